"""What a person sees of `tunewell train` while it runs: a live panel in a terminal, a line now and then elsewhere."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tunewell.cli.render import LastingStream
from tunewell.cli.screens.numbers import healing_line, one_line
from tunewell.cli.screens.run_state import RunSoFar
from tunewell.cli.screens.training_lines import PlainLines
from tunewell.training.events import Event

if TYPE_CHECKING:
    from rich.live import Live

_REFRESHES_PER_SECOND = 2


@contextmanager
def shown_training() -> Iterator["LivePanel | PlainLines"]:
    """Yield a listener that shows a run on stderr: a panel in a real terminal and not under `CI`, else plain lines.

    The panel goes away with the body. When the body fails, what the run noted until then stays on the screen.
    """
    is_live = sys.stderr.isatty() and not os.environ.get("CI") and os.environ.get("TERM") != "dumb"
    stream = LastingStream(sys.stderr, is_gone=not is_first_process())
    screen = LivePanel(stream) if is_live else PlainLines(stream)
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
    """Tell whether this process speaks for the run: of those that a launcher like `torchrun` started, one does."""
    return int(os.environ.get("WORLD_SIZE", "1")) <= 1 or os.environ.get("RANK", "0") == "0"


class LivePanel:
    """A listener that keeps one panel up to date; it appears with the first event."""

    def __init__(self, stream: LastingStream, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.run = RunSoFar(clock)
        self._stream = stream
        self._lock = threading.RLock()  # a signal handler may speak in the middle of a word
        self._live: Live | None = None
        self._is_closed = False

    def __call__(self, event: Event) -> None:
        """Keep an event; the panel shows it at the next refresh."""
        with self._lock:
            self.run(event)
        if self._live is None and not self._is_closed:
            self._open()

    def close(self) -> None:
        """Take the panel off the screen, for good: a checkpoint may still be on its way and send a note."""
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
