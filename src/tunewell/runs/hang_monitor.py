"""Detect that a run hangs, from its heartbeat and from the CPU time that it uses.

    on a CPU        no CPU time was used for `hang_seconds`, or 20 times that of a step without a sign of life
    on a GPU        the run was silent for `hang_seconds` and three of its slowest steps; it spins while it waits
    before step 1   no CPU time was used for five times `hang_seconds`

On a busy machine a step can take ten times as long as usual; it then uses as much CPU time as ever.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

_STEP_FACTOR = 3.0
_STAGE_FACTOR = 20.0
"""Saving, evaluation and compilation may be silent this many times longer than a step."""
_START_FACTOR = 5.0
"""Before the first step, a run may be idle for this many times `hang_seconds`: a download waits for its server."""
_SPIN_FACTOR = 20.0
_MIN_STEP_CPU = 1.0
_IDLE_SHARE = 0.01
_NUM_STEPS_KEPT = 32


def process_cpu_seconds(pid: int) -> float | None:
    """Return the CPU time that all threads of a process have used; None if the system does not report it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


@dataclass
class HangMonitor:
    """Reads the heartbeat of a run for its supervisor, and detects when the run hangs."""

    hang_seconds: float
    cpu_seconds: Callable[[], float | None] = lambda: None
    """Returns the CPU time of the run so far; None if it is unknown, and then only the clock counts."""
    exit_code: int | None = None
    """The exit code that the run sent before printing its result; None until then."""
    is_cpu: bool = False
    """Whether the run computes on a CPU."""
    step_seconds: list[float] = field(default_factory=list)
    step_cpu: list[float] = field(default_factory=list)
    is_in_stage: bool = True
    is_printing: bool = False
    _last_beat: float = field(default_factory=time.monotonic)
    _cpu_at_beat: float | None = None
    _cpu_at_step: float | None = None
    _active_at: float = field(default_factory=time.monotonic)
    _active_cpu: float | None = None
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
        """Process bytes of the heartbeat; the last line may be incomplete."""
        self.reset_timer()
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        for line in lines:
            self.is_in_stage = line in (b"stage", b"printed") or (self.is_in_stage and line == b"alive")
            self.is_printing = line.startswith(b"ended ")
            if self.is_printing:
                self.exit_code = int(line[6:])
            elif line in (b"cpu", b"gpu"):
                self.is_cpu = line == b"cpu"
            elif line.startswith(b"step "):
                self._add_step(float(line[5:]))

    def _add_step(self, seconds: float) -> None:
        self.step_seconds = [*self.step_seconds[-_NUM_STEPS_KEPT:], seconds]
        cpu = self._cpu_at_beat
        if cpu is not None and self._cpu_at_step is not None:
            self.step_cpu = [*self.step_cpu[-_NUM_STEPS_KEPT:], cpu - self._cpu_at_step]
        self._cpu_at_step = cpu

    def reset_timer(self) -> None:
        """Restart the timer of silence."""
        self._last_beat = self._active_at = time.monotonic()
        self._cpu_at_beat = self._active_cpu = self.cpu_seconds()

    @property
    def is_overdue(self) -> bool:
        """Whether the run hangs. There is no limit while it prints its result: the reader may be slow."""
        if self.is_printing:
            return False
        now, cpu = time.monotonic(), self.cpu_seconds()
        factor = _STAGE_FACTOR if self.is_in_stage else 1.0
        if not self.step_seconds:
            return cpu is not None and self._idle_seconds(now, cpu) > _START_FACTOR * self.hang_seconds
        if self.is_cpu and cpu is not None:
            is_idle = self._idle_seconds(now, cpu) > factor * self.hang_seconds
            return is_idle or (now - self._last_beat > self.hang_seconds and self._has_spun(cpu, factor))
        return now - self._last_beat > factor * (self.hang_seconds + _STEP_FACTOR * max(self.step_seconds))

    def _idle_seconds(self, now: float, cpu: float) -> float:
        """Return for how long the run has used almost no CPU time and given no sign of life."""
        if self._active_cpu is None or cpu - self._active_cpu >= _IDLE_SHARE * self.hang_seconds:
            self._active_at, self._active_cpu = now, cpu
        return now - self._active_at

    def _has_spun(self, cpu: float, factor: float) -> bool:
        """Return whether the run has used far more CPU time since its last sign of life than a step needs."""
        step = max(_MIN_STEP_CPU, median(self.step_cpu or self.step_seconds))
        return self._cpu_at_beat is not None and cpu - self._cpu_at_beat > _SPIN_FACTOR * factor * step
