"""Signal handling (Ctrl-C, SIGTERM): the first signal saves a checkpoint and stops; the second exits at once."""

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

_EXIT_CODES = {"SIGTERM": 143, "SIGINT": 130, "SIGUSR1": 143}
"""128 plus the signal number, as shells and schedulers expect. SIGUSR1 announces a SIGTERM."""
_ONE_REQUEST_SECONDS = 0.5
"""If a scheduler signals every process, a run receives the signal twice: directly and from its supervisor."""


class Interrupted(Exception):
    """Raised when a signal arrives during an evaluation, which is repeated on resume."""


class Signals:
    """Inside a `with` block, the first SIGTERM, SIGINT or SIGUSR1 sets `asked`; the second exits at once."""

    def __init__(self, *, is_installed: bool = True, on_request: Callable[[], None] = lambda: None) -> None:
        """Set up signal handling. `is_installed=False` sets no handlers, so that library calls leave signals alone.

        `on_request` is called by the first signal, for a run that waits for another process.
        """
        self._on_request = on_request
        self.asked: str | None = None
        """The name of the signal that arrived, e.g. `SIGTERM`."""
        self._asked_at = 0.0
        self._is_installed = is_installed
        self._before: dict[signal.Signals, Any] = {}

    @property
    def exit_code(self) -> int | None:
        """The exit code of the process; None before a signal has arrived."""
        return None if self.asked is None else _EXIT_CODES[self.asked]

    def check(self) -> None:
        """Raise Interrupted if a signal has arrived."""
        if self.asked is not None:
            raise Interrupted(self.asked)

    def __enter__(self) -> "Signals":
        # Python allows only the main thread to set handlers.
        if self._is_installed and threading.current_thread() is threading.main_thread():
            for name in _EXIT_CODES:
                if hasattr(signal, name):  # Windows has no SIGUSR1
                    number = signal.Signals[name]
                    self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # None means a handler that was not set from Python and cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.asked is None:
            self.asked, self._asked_at = name, time.monotonic()
            self._on_request()
            return
        if name == self.asked and time.monotonic() - self._asked_at < _ONE_REQUEST_SECONDS:
            return
        # Nothing is lost: events are already written, and checkpoints are atomic.
        os._exit(_EXIT_CODES[name])
