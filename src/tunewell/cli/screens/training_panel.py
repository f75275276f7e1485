"""The live panel of a run: a label, a number and a detail per line, fitted to the size of the terminal."""

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from tunewell.cli.render import one_line
from tunewell.cli.screens.numbers import (
    describe_method,
    format_change,
    format_loss,
    format_norm,
    format_speed,
    healing_line,
    short_model_name,
)
from tunewell.cli.screens.run_state import RECENT_STEPS, RunState
from tunewell.core.plot import sparkline
from tunewell.core.units import count, duration, size_bytes

_WIDEST = 80
"""Maximum width, also in wider terminals, so that lines do not wrap when the window is made narrower."""
_LABEL = 10
_NUMBER = 15
_LONGEST_BAR = 44
_FEWEST_BLOCKS = 10


@dataclass(frozen=True)
class Row:
    """One line with a label, a number, and details of several lengths. The longest detail that fits is shown."""

    label: str
    number: str
    details: tuple[str, ...] = ()
    style: str = ""


class Panel:
    """A rich renderable that draws the current state of a run."""

    def __init__(self, run: RunState, lock: AbstractContextManager[object]) -> None:
        self._run = run
        self._lock = lock

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines that fit on the screen. The least important ones are last."""
        with self._lock:
            lines = panel_lines(self._run, width=options.max_width, encoding=options.encoding)
        yield from lines[: max(options.size.height - 1, 1)]


def panel_lines(run: RunState, *, width: int, encoding: str = "utf-8") -> list[Text]:
    """Return the lines of the panel in at most `width` columns."""
    width = min(width, _WIDEST)
    number_width = max(_NUMBER, cell_len(_step_words(run)) if run.num_steps else 0)
    room = width - _LABEL - number_width - 2
    is_ascii = not encoding.lower().startswith("utf")
    lines = [*_title(run, width=width, encoding=encoding)]
    for row in (*_step_rows(run, room=room, is_ascii=is_ascii), *_news(run, encoding=encoding)):
        line = Text(f"{row.label:<{_LABEL}}", style="dim", no_wrap=True, end="\n")
        detail = next((words for words in row.details if cell_len(words) <= room), "")
        number = row.number.ljust(number_width) + "  " if detail else row.number
        line.append(number, style=row.style or "not dim")
        line.append(detail, style="not dim")
        lines.append(_cut(line, width, is_ascii=is_ascii))
    return lines


def _title(run: RunState, *, width: int, encoding: str) -> list[Text]:
    if run.start is None:
        return []
    model, method = one_line(short_model_name(run.start.plan.model), encoding=encoding), describe_method(run.start)
    is_ascii = not encoding.lower().startswith("utf")
    if cell_len(model) + 3 + len(method) <= width:
        return [Text.assemble((model, "bold"), "   ", method), Text("")]
    lines = [Text(model, style="bold"), Text(method)]
    return [*(_cut(line, width, is_ascii=is_ascii) for line in lines), Text("")]


def _step_words(run: RunState) -> str:
    total = count(run.num_steps)
    return f"{count(run.step):>{len(total)}} of {total}"


def _step_rows(run: RunState, *, room: int, is_ascii: bool) -> list[Row]:
    if run.start is None or run.last is None:
        return [Row("step", _step_words(run)), *_held_out(run)] if run.start else []
    event = run.last
    share = min(max(run.step / max(run.num_steps, 1), 0.0), 1.0)
    bar = _bar(share, min(room - 5, _LONGEST_BAR), is_ascii=is_ascii)
    style = "bold" if math.isfinite(event.loss) else "bold red"
    memory = size_bytes(event.memory_bytes) if event.memory_bytes is not None else ""
    norm = format_norm(event.grad_norm)
    return [
        Row("step", _step_words(run), (f"{bar} {share:4.0%}", f"{share:.0%}")),
        Row("loss", format_loss(event.loss), _loss_details(run, room=room, is_ascii=is_ascii), style),
        *_held_out(run),
        Row("time", duration(run.elapsed()), _time_details(run)),
        Row("speed", format_speed(run.tokens_per_second()), (f"at most {memory} of memory", memory) if memory else ()),
        Row("rate", f"{event.learning_rate:.1e}", (f"gradient norm {norm}", f"norm {norm}")),
    ]


def _loss_details(run: RunState, *, room: int, is_ascii: bool) -> tuple[str, ...]:
    skipped = f"{count(run.num_skipped)} skipped" if run.num_skipped else ""
    change = format_change(run.change())
    words = ", ".join(part for part in (change, skipped) if part)
    brief = ", ".join(part for part in (change.partition(" in ")[0], skipped) if part)
    blocks = min(room - len(words) - 2, RECENT_STEPS)
    if is_ascii or blocks < _FEWEST_BLOCKS:
        return (words, brief)
    return (f"{sparkline([event.loss for event in run.recent], blocks)}  {words}".rstrip(),)


def _held_out(run: RunState) -> list[Row]:
    if run.held_out is None:
        return []
    best, details = run.best, ()
    if not run.held_out.step:
        details = ("before training",)
    elif best is not None and best.step == run.held_out.step:
        right = f"{best.right_words}, " if best.right_words else ""
        details = (f"{right}at step {count(best.step)}, the best so far", f"{right}the best so far")
    elif best is not None:
        now, lowest = run.held_out.right_words, f"best {best.right_words or format_loss(best.loss)}"
        at = f"{now}, at step" if now else "at step"
        details = (f"{at} {count(run.held_out.step)}; {lowest} at step {count(best.step)}", lowest)
    return [Row("held-out", format_loss(run.held_out.loss), details)]


def _time_details(run: RunState) -> tuple[str, ...]:
    left = run.seconds_left()
    if left is None or left < 1:  # the estimate was too low
        return ()
    return (f"about {duration(left)} left", f"{duration(left)} left")


def _news(run: RunState, *, encoding: str) -> list[Row]:
    now = one_line(run.stage, encoding=encoding) or ("training" if run.start else "starting")
    waited = run.clock() - run.stage_started
    if run.stage and run.stage_text.progress.total:
        now = one_line(run.stage_text.text(), encoding=encoding)
    elif run.stage and waited >= 1:
        now = f"{now}, {duration(waited)}"
    rows = [Row("now", now)]
    if run.healing:
        label, _, words = healing_line(run.healing[-1]).partition(": ")
        rows.append(Row(label, one_line(words, encoding=encoding), style="bold yellow"))
    if run.sample is not None:
        is_untrained = run.held_out is not None and not run.held_out.step
        rows.append(Row("asked", one_line(run.sample.question, encoding=encoding)))
        rows.append(Row("untrained" if is_untrained else "reply", one_line(run.sample.answer, encoding=encoding)))
    return rows


def _bar(share: float, width: int, *, is_ascii: bool) -> str:
    done, to_do = ("#", "-") if is_ascii else ("━", "─")
    filled = int(share * max(width, 0))
    return done * filled + to_do * (max(width, 0) - filled)


def _cut(line: Text, width: int, *, is_ascii: bool) -> Text:
    """Truncate a line that is too long, with an ellipsis at the end."""
    if line.cell_len > width:
        mark = "..." if is_ascii else "…"
        line.truncate(max(width - cell_len(mark), 0))
        line.rstrip()
        line.append(mark)
    return line
