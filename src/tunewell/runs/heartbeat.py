"""The heartbeat of a supervised run: the messages that it sends to its supervisor through a pipe.

run -> supervisor   "cpu" or "gpu" before the first step, "step 1.203" after each step, "stage" when other work begins,
                    "alive" at most once a second, "ended 0" with the exit code before printing, "printed" after it
supervisor -> run   no messages; the lifeline pipe closes when the supervisor dies, and the run then saves and exits
"""

import contextlib
import faulthandler
import os
import signal
import threading
import time

from tunewell.core.progress import Progress
from tunewell.training.events import Evaluated, Event, RunStarted, StepTaken

_MIN_BEAT_SECONDS = 1.0


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
            case RunStarted(plan=plan):
                self._send(b"cpu\n" if plan.device.value == "cpu" else b"gpu\n")
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
