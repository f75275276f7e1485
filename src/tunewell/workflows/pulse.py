"""Signs of life that a run under supervision gives, and its way to notice that nobody supervises it any more.

supervisor  <- "step 1.203" after each step, "stage" when something else begins, "alive" now and then
run         <- the end of a pipe that nobody ever writes to: it ends with the supervisor
"""

import contextlib
import faulthandler
import os
import signal
import threading
import time
from typing import Any

from tunewell.records.healing import HealingEntry

_LEAST_SECONDS = 1.0


class Pulse:
    """A watcher that tells a supervisor how a run goes, and passes everything on."""

    def __init__(self, watcher: Any, handles: str) -> None:
        """Take what the supervisor opened, as it spelled it: `READ,WRITE,STACKS`."""
        self._watcher = watcher
        read, self._write, stacks = (int(part) for part in handles.split(","))
        self._told = 0.0
        threading.Thread(target=_leave_with, args=(read,), daemon=True, name="lifeline").start()
        faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)

    def begun(self, start: Any) -> None:
        self._watcher.begun(start)

    def doing(self, stage: str) -> None:
        self._tell(b"stage\n")
        self._watcher.doing(stage)

    def stepped(self, event: Any) -> None:
        self._tell(f"step {event.seconds}\n".encode())
        self._watcher.stepped(event)

    def looked(self, event: Any, samples: Any) -> None:
        self._tell(b"alive\n")
        self._watcher.looked(event, samples)

    def healed(self, entry: HealingEntry) -> None:
        self._watcher.healed(entry)

    def rewound(self, step: int) -> None:
        self._watcher.rewound(step)

    def noted(self, message: str) -> None:
        self._watcher.noted(message)

    def beat(self) -> None:
        """Say that something is being computed; at most once a second."""
        now = time.monotonic()
        if now - self._told >= _LEAST_SECONDS:
            self._tell(b"alive\n")

    def _tell(self, line: bytes) -> None:
        self._told = time.monotonic()
        with contextlib.suppress(OSError):  # whoever listened is gone, which the other pipe tells
            os.write(self._write, line)


def _leave_with(read: int) -> None:
    """Wait for the supervisor's end, and ask this process to save and leave."""
    with contextlib.suppress(OSError):
        while os.read(read, 1):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
