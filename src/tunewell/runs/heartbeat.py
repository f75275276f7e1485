"""Signs of life that a run under supervision gives, and its way to notice that nobody supervises it any more.

supervisor  <- "step 1.203" after each step, "stage" when something else begins, "alive" now and then;
               "ended 0" with the exit code when it is done, "printed" when its last words are out
run         <- the end of a pipe that nobody ever writes to: it ends with the supervisor
"""

import contextlib
import faulthandler
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from statistics import median

from tunewell.core.progress import Progress
from tunewell.training.events import Evaluated, Event, StepTaken

_LEAST_SECONDS = 1.0
_STEP_FACTOR = 3.0
_STAGE_FACTOR = 20.0
"""How much longer than a step's wait something else may be silent: a large checkpoint, a look, compiling."""
_STEPS_REMEMBERED = 32


@dataclass
class HeartbeatMonitor:
    """Hears a run's signs of life for its supervisor, and knows how long silence may last."""

    hang_seconds: float
    exit_code: int | None = None
    """The exit code that the run reported before printing its result; None before."""
    heard: float = field(default_factory=time.monotonic)
    seconds: list[float] = field(default_factory=list)
    is_in_stage: bool = True
    is_printing: bool = False
    _rest: bytes = b""

    def read(self, heartbeat: int) -> bool:
        """Hear all that has been said in a pipe that does not block; False where nothing more can come."""
        try:
            while data := os.read(heartbeat, 65_536):
                self.feed(data)
        except BlockingIOError:
            return True
        return False

    def feed(self, data: bytes) -> None:
        """Take in lines, the last of which may be cut."""
        self.reset_timer()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self.is_in_stage = line in (b"stage", b"printed") or (self.is_in_stage and line == b"alive")
            self.is_printing = line.startswith(b"ended ")
            if self.is_printing:
                self.exit_code = int(line[6:])
            if line.startswith(b"step "):
                self.seconds = [*self.seconds[-_STEPS_REMEMBERED:], float(line[5:])]

    def reset_timer(self) -> None:
        """Count silence from now on."""
        self.heard = time.monotonic()

    @property
    def patience(self) -> float | None:
        """Seconds of silence after which the run hangs; None where it may take any time.

        So it may before the first step, and while its last words wait for a reader.
        """
        if not self.seconds or self.is_printing:
            return None
        wait = self.hang_seconds + _STEP_FACTOR * median(self.seconds)
        return wait * _STAGE_FACTOR if self.is_in_stage else wait

    @property
    def is_overdue(self) -> bool:
        """Whether the run has been silent for too long."""
        return self.patience is not None and time.monotonic() - self.heard > self.patience


class Heartbeat:
    """A listener that reports to a supervisor how a run goes."""

    def __init__(self, handles: str) -> None:
        """Take the pipes that the supervisor opened, as it spelled them: `READ,WRITE,STACKS`."""
        read, self._write, stacks = _opened(handles)
        self._told = 0.0
        threading.Thread(target=_leave_with, args=(read,), daemon=True, name="lifeline").start()
        faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)

    def __call__(self, event: Event) -> None:
        match event:
            case Progress():
                self._tell(b"stage\n")
            case StepTaken(seconds=seconds):
                self._tell(f"step {seconds}\n".encode())
            case Evaluated():
                self._tell(b"alive\n")

    def beat(self) -> None:
        """Say that something is being computed; at most once a second."""
        now = time.monotonic()
        if now - self._told >= _LEAST_SECONDS:
            self._tell(b"alive\n")

    def _tell(self, line: bytes) -> None:
        self._told = time.monotonic()
        _send(self._write, line)


def send_ended(handles: str, code: int) -> None:
    """Tell a supervisor the exit code, before last words are printed: a screen that is gone is no crash of the run."""
    _send(_opened(handles)[1], f"ended {code}\n".encode())


def send_printed(handles: str) -> None:
    """Tell a supervisor that nothing is left to do but to leave: from now on silence is a hang again."""
    _send(_opened(handles)[1], b"printed\n")


def _opened(handles: str) -> tuple[int, int, int]:
    read, write, stacks = (int(part) for part in handles.split(","))
    return read, write, stacks


def _send(pipe: int, line: bytes) -> None:
    with contextlib.suppress(OSError):  # whoever listened is gone, which the other pipe tells
        os.write(pipe, line)


def _leave_with(read: int) -> None:
    """Wait for the supervisor's end, and ask this process to save and leave."""
    with contextlib.suppress(OSError):
        while os.read(read, 1):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
