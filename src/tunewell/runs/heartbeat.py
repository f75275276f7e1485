"""The heartbeat of a supervised run: the messages it sends through a pipe, and how the supervisor detects a hang.

run -> supervisor   "step 1.203" after each step, "stage" when other work begins, "alive" at most once a second,
                    "ended 0" with the exit code before printing, "printed" before exiting
supervisor -> run   no messages; the lifeline pipe closes when the supervisor dies, and the run then saves and exits
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

_MIN_BEAT_SECONDS = 1.0
_STEP_FACTOR = 3.0
_STAGE_FACTOR = 20.0
"""Saving, evaluation and compilation may be silent this many times longer than a step."""
_NUM_STEPS_KEPT = 32


@dataclass
class HeartbeatMonitor:
    """Reads the heartbeat of a run for its supervisor, and detects when the run hangs."""

    hang_seconds: float
    exit_code: int | None = None
    """The exit code that the run sent before printing its result; None until then."""
    last_beat: float = field(default_factory=time.monotonic)
    step_seconds: list[float] = field(default_factory=list)
    is_in_stage: bool = True
    is_printing: bool = False
    _partial_line: bytes = b""

    def read(self, heartbeat: int) -> bool:
        """Read all data from a non-blocking pipe. Return False if the run has closed it."""
        try:
            while data := os.read(heartbeat, 65_536):
                self.feed(data)
        except BlockingIOError:
            return True
        return False

    def feed(self, data: bytes) -> None:
        """Process bytes of the heartbeat. The last line may be incomplete."""
        self.reset_timer()
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        for line in lines:
            self.is_in_stage = line in (b"stage", b"printed") or (self.is_in_stage and line == b"alive")
            self.is_printing = line.startswith(b"ended ")
            if self.is_printing:
                self.exit_code = int(line[6:])
            if line.startswith(b"step "):
                self.step_seconds = [*self.step_seconds[-_NUM_STEPS_KEPT:], float(line[5:])]

    def reset_timer(self) -> None:
        """Restart the timer that measures the silence."""
        self.last_beat = time.monotonic()

    @property
    def patience(self) -> float | None:
        """Seconds of silence after which the run counts as hung; None before the first step and during printing."""
        if not self.step_seconds or self.is_printing:
            return None
        wait = self.hang_seconds + _STEP_FACTOR * median(self.step_seconds)
        return wait * _STAGE_FACTOR if self.is_in_stage else wait

    @property
    def is_overdue(self) -> bool:
        """Whether the run has been silent for too long."""
        return self.patience is not None and time.monotonic() - self.last_beat > self.patience


class Heartbeat:
    """A listener that sends the heartbeat of this run to its supervisor."""

    def __init__(self, fds: str) -> None:
        """Use the descriptors `READ,WRITE,STACKS`: stop if the supervisor dies, and dump all stacks on SIGUSR2."""
        read, self._write, stacks = _parse_fds(fds)
        self._sent_at = 0.0
        threading.Thread(target=_stop_without_supervisor, args=(read,), daemon=True, name="lifeline").start()
        faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)

    def __call__(self, event: Event) -> None:
        match event:
            case Progress():
                self._send(b"stage\n")
            case StepTaken(seconds=seconds):
                self._send(f"step {seconds}\n".encode())
            case Evaluated():
                self._send(b"alive\n")

    def beat(self) -> None:
        """Report that the run is alive, at most once a second."""
        now = time.monotonic()
        if now - self._sent_at >= _MIN_BEAT_SECONDS:
            self._send(b"alive\n")

    def _send(self, line: bytes) -> None:
        self._sent_at = time.monotonic()
        _write(self._write, line)


def send_to_supervisor(fds: str, line: str) -> None:
    """Send `ended CODE` (a closed terminal is then not a crash) or `printed` (silence is then a hang again)."""
    _write(_parse_fds(fds)[1], f"{line}\n".encode())


def _parse_fds(fds: str) -> tuple[int, int, int]:
    read, write, stacks = (int(part) for part in fds.split(","))
    return read, write, stacks


def _write(pipe: int, line: bytes) -> None:
    with contextlib.suppress(OSError):  # the supervisor died; the lifeline reports that
        os.write(pipe, line)


def _stop_without_supervisor(read: int) -> None:
    """Wait until the supervisor dies, then send SIGTERM to this process, which saves and exits."""
    with contextlib.suppress(OSError):
        while os.read(read, 1):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
