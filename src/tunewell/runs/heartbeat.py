"""What a run does now: its activity in `.pulse`, and the messages to its supervisor through a pipe.

run -> supervisor   "cpu" or "gpu" before the first step, "step 1.203" after each step, "stage" when other work begins,
                    "alive" at most once a second, "ended 0" with the exit code before printing, "printed" after it
supervisor -> run   no messages; the lifeline pipe closes when the supervisor dies, and the run then saves and exits
"""

import contextlib
import faulthandler
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from tunewell.core.files import open_file
from tunewell.core.progress import Progress
from tunewell.core.redact import redact
from tunewell.records.rundir import PULSE
from tunewell.training.events import Event, RunStarted, StepTaken

_MIN_SECONDS = 1.0
"""The file is written, and "alive" is sent, at most this often."""


class Pulse:
    """A listener that writes the current activity of this run to `.pulse`, and sends the heartbeat to a supervisor."""

    def __init__(self, fds: str | None = None) -> None:
        """Use the descriptors `READ,WRITE,STACKS`: stop if the supervisor dies, and dump all stacks on SIGUSR2."""
        self._fds = fds
        self._path: Path | None = None
        self._sent_at = self._written_at = 0.0
        self._activity: dict[str, Any] = {"stage": "starting", "step": 0, "passes": 0}
        if fds:
            read, _, stacks = _parse_fds(fds)
            threading.Thread(target=_stop_without_supervisor, args=(read,), daemon=True, name="lifeline").start()
            faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)

    def open(self, folder: Path) -> None:
        """Write to this run folder from now on."""
        self._path = folder / PULSE
        self._write()

    def __call__(self, event: Event) -> None:
        line = "alive"
        match event:
            case RunStarted(plan=plan, first_step=step):
                line = "cpu" if plan.device.value == "cpu" else "gpu"
                self._activity = {"stage": "", "step": step, "passes": 0}
            case Progress(stage):
                line = "stage"
                self._activity |= {"stage": stage, "passes": 0}
            case StepTaken(step=step, seconds=seconds):
                line = f"step {seconds}"
                self._activity = {"stage": "", "step": step, "passes": 0}
        self._report(line)

    def beat(self) -> None:
        """Count a forward pass, and report that the run is alive."""
        self._activity["passes"] += 1
        self._report()

    def _report(self, line: str = "alive") -> None:
        now = time.monotonic()
        if now - self._written_at >= _MIN_SECONDS:
            self._write()
        if self._fds and (line != "alive" or now - self._sent_at >= _MIN_SECONDS):
            self._sent_at = now
            send_to_supervisor(self._fds, line)

    def _write(self) -> None:
        self._written_at = time.monotonic()
        if self._path is None:
            return
        own = {"pid": os.getpid(), "supervisor": os.getppid() if self._fds else None}
        text = json.dumps(redact({"time": round(time.time(), 3), **own, **self._activity}))
        with contextlib.suppress(OSError), open_file(self._path, "w") as file:  # a full disk; the run itself reports it
            file.write(text + "\n")


def send_to_supervisor(fds: str, line: str) -> None:
    """Send `ended CODE` (a closed terminal is then not a crash), `printed` (silence is then a hang again), ..."""
    with contextlib.suppress(OSError):  # the supervisor died; the lifeline reports that
        os.write(_parse_fds(fds)[1], f"{line}\n".encode())


def _parse_fds(fds: str) -> list[int]:
    return [int(part) for part in fds.split(",")]


def _stop_without_supervisor(read: int) -> None:
    """Wait until the supervisor dies, then send SIGTERM to this process, which saves and exits."""
    with contextlib.suppress(OSError):
        while os.read(read, 1):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
