"""Asked to stop from outside: finish the step, save, leave; asked twice: leave at once."""

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

_EXIT_CODES = {"SIGTERM": 143, "SIGINT": 130, "SIGUSR1": 143}
"""128 and the signal's number, which is what shells and schedulers look for; SIGUSR1 announces a SIGTERM."""


_ONE_REQUEST_SECONDS = 0.5
"""A scheduler that signals every process reaches a run twice: by itself, and through its supervisor."""


class Interrupted(Exception):
    """A signal has come in the middle of something that can be done again."""


class Signals:
    """While it is entered, the first SIGTERM, SIGINT or SIGUSR1 sets `asked`; the second ends the process at once.

    with Signals() as signals:
        while not signals.asked: ...
    """

    def __init__(self, *, is_installed: bool = True) -> None:
        """Without `is_installed`, no handler is set and no signal is noticed: a library call leaves signals alone."""
        self.asked: str | None = None
        """The name of the signal that came, for example `SIGTERM`."""
        self._asked_at = 0.0
        self._is_installed = is_installed
        self._before: dict[signal.Signals, Any] = {}

    @property
    def exit_code(self) -> int | None:
        """What the process should exit with; None while nothing was asked."""
        return None if self.asked is None else _EXIT_CODES[self.asked]

    def check(self) -> None:
        """Raise Interrupted once a signal has come."""
        if self.asked is not None:
            raise Interrupted(self.asked)

    def __enter__(self) -> "Signals":
        # Python lets only the main thread set handlers; elsewhere signals are the business of whoever runs that thread.
        if self._is_installed and threading.current_thread() is threading.main_thread():
            for name in _EXIT_CODES:
                if hasattr(signal, name):  # Windows has no SIGUSR1
                    number = signal.Signals[name]
                    self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # None is a handler that was not set from Python, and cannot be set again from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def _take(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.asked is None:
            self.asked, self._asked_at = name, time.monotonic()
            return
        if name == self.asked and time.monotonic() - self._asked_at < _ONE_REQUEST_SECONDS:
            return
        # Nothing is lost: events are with the system already, and a checkpoint is whole or absent.
        os._exit(_EXIT_CODES[name])
