"""Show a training run while it runs: a live panel in a terminal, log lines elsewhere."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tunewell.cli.render import BestEffortStream, is_interactive, one_line
from tunewell.cli.screens.numbers import healing_line
from tunewell.cli.screens.run_state import RunState
from tunewell.cli.screens.training_lines import LogLines
from tunewell.training.events import Event

if TYPE_CHECKING:
    from rich.live import Live

_REFRESHES_PER_SECOND = 2


@contextmanager
def shown_training() -> Iterator["LivePanel | LogLines"]:
    """Yield a listener that shows a run on stderr: a panel in a terminal, log lines in a pipe or under `CI`.

    The panel is removed at the end. If the run fails, its notes and healing actions stay on the screen.
    """
    is_live = is_interactive()
    stream = BestEffortStream(sys.stderr, is_gone=not is_first_process())
    screen = LivePanel(stream) if is_live else LogLines(stream)
    try:
        yield screen
    except BaseException:
        screen.close()
        if is_live:
            for entry in screen.run.healing:
                stream.write(f"{healing_line(entry)}\n")
            for note in screen.run.notes:
                stream.write(f"note: {one_line(note)}\n")
        raise
    screen.close()


def is_first_process() -> bool:
    """Return True on rank 0, the only process of a distributed run that prints."""
    return int(os.environ.get("WORLD_SIZE", "1")) <= 1 or os.environ.get("RANK", "0") == "0"


class LivePanel:
    """A listener that shows a run in a live panel; it opens with the first event."""

    def __init__(self, stream: BestEffortStream, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.run = RunState(clock)
        self._stream = stream
        self._lock = threading.RLock()  # a signal handler may report an event while another is handled
        self._live: Live | None = None
        self._is_closed = False

    def __call__(self, event: Event) -> None:
        """Record an event; the panel shows it at the next refresh."""
        with self._lock:
            self.run(event)
        if self._live is None and not self._is_closed:
            self._open()

    def close(self) -> None:
        """Remove the panel for good: a checkpoint that is still being written may send a note later."""
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
