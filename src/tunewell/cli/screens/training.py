"""Show a run in progress: a live panel in a terminal, log lines elsewhere."""

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tunewell.cli.render import BestEffortStream, folded_table, hanging, is_interactive, one_line
from tunewell.cli.screens.numbers import (
    describe_method,
    format_loss,
    format_norm,
    format_speed,
    healing_line,
    short_model_name,
)
from tunewell.cli.screens.run_state import RunState
from tunewell.core.launcher import is_first
from tunewell.core.progress import Progress
from tunewell.core.text import shorten
from tunewell.core.units import count, duration, size_bytes
from tunewell.training.events import Evaluated, Event, Healed, Note, Rewound, RunStarted, StepTaken

if TYPE_CHECKING:
    from rich.live import Live

_REFRESHES_PER_SECOND = 2
_SHORTEST_WAIT, _LONGEST_WAIT = 10.0, 60.0
_WAIT_SHARE = 1 / 20
"""Time between step lines as a share of the elapsed time, within the bounds above: about twenty lines."""
_FEWEST_LINES = 10
_LINE_CHARS = 110
_LOSS_CHARS = len("  loss 1.2345")


@contextmanager
def shown_training() -> Iterator["LivePanel | LogLines"]:
    """Yield a listener that shows a run on stderr. If the run fails, its healing actions stay visible."""
    is_live = is_interactive()
    stream = BestEffortStream(sys.stderr, is_gone=not is_first())
    screen = LivePanel(stream) if is_live else LogLines(stream)
    try:
        yield screen
    except BaseException:
        screen.close()
        if is_live:
            for entry in screen.run.healing:
                stream.write(f"{hanging('', healing_line(entry))}\n")
        raise
    screen.close()


class _RunScreen:
    """A listener that keeps the state of a run and writes to a stream."""

    def __init__(self, stream: BestEffortStream, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.run = RunState(clock)
        self._stream = stream
        self._lock = threading.RLock()  # a signal handler may report an event while another is handled

    def close(self) -> None:
        """Remove the parts of the screen that are only shown during the run."""


class LivePanel(_RunScreen):
    """A listener that shows a run in a live panel, which opens with the first event."""

    _live: "Live | None" = None
    _is_closed = False

    def __call__(self, event: Event) -> None:
        """Record an event, which the panel shows at the next refresh."""
        with self._lock:
            self.run(event)
        if self._live is None and not self._is_closed:
            self._open()
        if self._live is None:
            return
        # Above the panel, where it stays in full.
        if isinstance(event, RunStarted) and event.checklist:
            self._live.console.print(checklist_lines(event))
        elif isinstance(event, Note):
            self._live.console.print(hanging("note: ", one_line(event.message)))

    def close(self) -> None:
        """Remove the panel permanently, because a checkpoint that is still being written may send a note later."""
        self._is_closed = True
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _open(self) -> None:
        from rich.console import Console
        from rich.live import Live

        from tunewell.cli.screens.training_panel import Panel

        console = Console(file=self._stream, highlight=False, markup=False, emoji=False)  # type: ignore[arg-type]
        panel = Panel(self.run, self._lock)
        self._live = Live(panel, console=console, transient=True, refresh_per_second=_REFRESHES_PER_SECOND)
        self._live.start(refresh=True)


class LogLines(_RunScreen):
    """A listener that writes log lines for the first, last and some other steps, evaluations and notes."""

    _wrote_at = _wrote_stage_at = -math.inf  # so that the first step and the first stage are due
    _wrote_step = 0
    _was_finite = True

    def __call__(self, event: Event) -> None:
        """Write the lines of an event."""
        last_stage = self.run.stage
        self.run(event)
        match event:
            case Progress(stage) if stage and not (self.run.start and self.run.step < self.run.num_steps):
                if stage != last_stage or self.run.clock() - self._wrote_stage_at >= _SHORTEST_WAIT:
                    self._write(one_line(self.run.stage_text.text()))
                    self._wrote_stage_at = self.run.clock()
            case RunStarted():
                left = f", resuming after step {count(event.first_step)}" if event.first_step else ""
                self._write(f"training {short_model_name(event.plan.model)}: {describe_method(event)}")
                self._write(f"{count(self.run.num_steps, 'step')}{left}")
                if event.checklist:
                    self._write(checklist_lines(event))
            case StepTaken():
                self._write_step(event)
            case Evaluated():
                self._write_evaluation(event)
            case Healed(entry):
                self._write(healing_line(entry))
            case Rewound(step):
                self._wrote_step = min(self._wrote_step, step)
            case Note(message):
                self._write(f"note: {one_line(message)}")

    def _write_step(self, event: StepTaken) -> None:
        is_finite = math.isfinite(event.loss) and math.isfinite(event.grad_norm)
        turned_bad = self._was_finite and not is_finite
        self._was_finite = is_finite
        if turned_bad or event.step >= self.run.num_steps or self._is_due():
            self._write(self._step_line(event))
            self._wrote_at, self._wrote_step = self.run.clock(), event.step

    def _write_evaluation(self, event: Evaluated) -> None:
        found = f"{count(event.documents, 'row')} in {duration(event.seconds)}"
        best = "" if not event.is_best else "the best so far" if event.step else "before training"
        best = "".join(f"{part}, " for part in (event.right_words, best) if part)
        # Aligned with the held-out column of the step lines.
        self._write(
            f"{self._step_label(event.step)}{' ' * _LOSS_CHARS}  held-out {format_loss(event.loss):>6}  {best}{found}"
        )
        for sample in event.samples[:1]:
            self._write(f"  asked: {shorten(one_line(sample.question), _LINE_CHARS)}")
            label = "reply" if event.step else "reply, untrained"
            self._write(f"  {label}: {shorten(one_line(sample.answer), _LINE_CHARS)}")

    def _is_due(self) -> bool:
        wait = min(max(self.run.elapsed() * _WAIT_SHARE, _SHORTEST_WAIT), _LONGEST_WAIT)
        tenths = [step * _FEWEST_LINES // max(self.run.num_steps, 1) for step in (self._wrote_step, self.run.step)]
        return self.run.clock() - self._wrote_at >= wait or tenths[1] > tenths[0]

    def _step_label(self, step: int) -> str:
        total = count(self.run.num_steps)
        return f"step {count(step):>{len(total)}}/{total}"

    def _step_line(self, event: StepTaken) -> str:
        run = self.run
        words = [self._step_label(event.step), f"loss {format_loss(event.loss):>6}"]
        if run.held_out is not None:
            words.append(f"held-out {format_loss(run.held_out.loss):>6}")
        words += [f"norm {format_norm(event.grad_norm):>5}", f"rate {event.learning_rate:.1e}"]
        words.append(f"{format_speed(run.tokens_per_second()):>16}")
        if event.memory_bytes is not None:
            words.append(f"{size_bytes(event.memory_bytes):>9}")
        left = run.seconds_left()
        if left is not None and event.step < run.num_steps:
            words.append(f"{duration(left)} left")
        if event.was_skipped:
            words.append("skipped")
        return "  ".join(words)

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


def checklist_lines(start: RunStarted) -> str:
    """Return the check list before the first step."""
    rows = [[f"  {item.name}", "-" if item.state == "unknown" else item.state, item.value] for item in start.checklist]
    return f"checked before step {count(start.first_step + 1)}:\n{folded_table(rows, gap=2)}"
