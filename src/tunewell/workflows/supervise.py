"""Watch over a run from a small process beside it: what kills, crashes or hangs the run does not end it.

tunewell train          the supervisor: no torch, no lock, a few megabytes
  tunewell train ...    the run itself, started again with `--resume` where it died
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

from tunewell.config.rules import Healing
from tunewell.core.units import count
from tunewell.records.events import EventLog
from tunewell.records.healing import HEALING, ActionName, HealingEntry, read_healing
from tunewell.records.plan import read_plan

STACKS = "stacks.txt"
"""What every thread was doing when a run was found hanging."""
EXIT_MACHINE = 1
_FINAL_CODES = frozenset({0, 2, 3, 4, 130, 143})
"""Ends that a run has chosen itself: done, refused, weak, stopped by health, asked to stop."""
_FORWARDED = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP")
_STEP_FACTOR = 3.0
_STAGE_FACTOR = 20.0
"""How much longer than a step's wait something else may be silent: a large checkpoint, a look, compiling."""
_SECONDS_FOR_STACKS = 2.0
_STEPS_REMEMBERED = 32


def can_supervise() -> bool:
    """Whether a run here can have a supervisor: a launcher is one itself, and Windows has no groups of processes."""
    return os.name == "posix" and int(os.environ.get("WORLD_SIZE", "1")) <= 1 and sys.gettrace() is None


@dataclass
class _Ear:
    """Hears a run's signs of life, and knows how long silence may last."""

    hang_seconds: float
    heard: float = field(default_factory=time.monotonic)
    seconds: list[float] = field(default_factory=list)
    is_in_stage: bool = True
    _rest: bytes = b""

    def hear(self, data: bytes) -> None:
        self.heard = time.monotonic()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self.is_in_stage = line == b"stage" or (self.is_in_stage and line == b"alive")
            if line.startswith(b"step "):
                self.seconds = [*self.seconds[-_STEPS_REMEMBERED:], float(line[5:])]

    @property
    def patience(self) -> float | None:
        """Seconds of silence after which the run hangs; None before the first step, which may take any time."""
        if not self.seconds:
            return None
        wait = self.hang_seconds + _STEP_FACTOR * median(self.seconds)
        return wait * _STAGE_FACTOR if self.is_in_stage else wait

    @property
    def is_overdue(self) -> bool:
        return self.patience is not None and time.monotonic() - self.heard > self.patience


def supervise(
    line: Callable[[bool, str], Sequence[str]], *, folder: Path, rules: Healing, tell: Callable[[str], None]
) -> int:
    """Run a training command until it ends by itself, starting it again where something ended it; give its exit code.

    `line(is_again, handles)` spells the command. Nothing is started again that has not taken a step, and nothing more
    often for the same step than the rules allow.
    """
    tries: dict[int, int] = {}
    is_again = False
    while True:
        code, is_hung = _watch(line, is_again=is_again, rules=rules, folder=folder)
        if code in _FINAL_CODES and not is_hung:
            return code
        step = _last_step(folder)
        cause, name = _cause(code, is_hung=is_hung)
        tries[step] = tries.get(step, 0) + 1
        is_pointless = step < 1 or not rules.on
        if is_pointless or tries[step] > rules.restarts:
            why = "" if is_pointless else f", {count(rules.restarts)} times at the same step"
            tell(f"the run {cause} after step {count(max(step, 0))}{why}{_where(folder)}")
            if not is_pointless:
                _write(folder, step, name, "stop", f"{cause}, again and again; given up")
            return EXIT_MACHINE
        halved = _halved(folder) if name == "killed" and tries[step] > 1 else None
        smaller = f", {count(halved)} tokens at once" if halved else ""
        words = f"{cause}: started again from the last checkpoint{smaller}"
        tell(f"the run {words} ({count(tries[step])} of {count(rules.restarts)} tries){_where(folder)}")
        _write(folder, step, name, "restart", words, micro_batch_tokens=halved)
        is_again = True


def _watch(line: Any, *, is_again: bool, rules: Healing, folder: Path) -> tuple[int, bool]:
    """Start the run and wait for its end; end it where it hangs. Gives the exit code and whether it hung."""
    life_read, life_write = os.pipe()
    pulse_read, pulse_write = os.pipe()
    ear = _Ear(rules.hang_seconds)
    try:
        with tempfile.TemporaryFile() as stacks:
            theirs = (life_read, pulse_write, stacks.fileno())
            # A group of its own: a terminal's Ctrl-C comes here alone, and is handed on once.
            run = subprocess.Popen(line(is_again, ",".join(map(str, theirs))), pass_fds=theirs, process_group=0)
            os.close(life_read)
            os.close(pulse_write)
            with _forwarding(run):
                while run.poll() is None:
                    if select.select([pulse_read], [], [], 0.2)[0]:
                        data = os.read(pulse_read, 65_536)
                        if not data:  # it has closed its end, and is about to leave
                            return run.wait(), False
                        ear.hear(data)
                    elif ear.is_overdue:
                        _end(run)
                        stacks.seek(0)
                        (folder / STACKS).write_bytes(stacks.read())
                        return run.returncode, True
            return run.returncode, False
    finally:
        os.close(pulse_read)
        os.close(life_write)


def _end(run: "subprocess.Popen[Any]") -> None:
    """Ask a run that hangs what it is doing, and end it."""
    with contextlib.suppress(OSError):
        run.send_signal(signal.SIGUSR2)
    time.sleep(_SECONDS_FOR_STACKS)
    with contextlib.suppress(OSError):
        os.killpg(run.pid, signal.SIGKILL)
    run.wait()


@contextlib.contextmanager
def _forwarding(run: "subprocess.Popen[Any]") -> Any:
    """Hand signals on to the run; what closes a terminal asks it to save and leave."""

    def forward(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        with contextlib.suppress(OSError):
            run.send_signal(signal.SIGTERM if name == "SIGHUP" else number)

    def pause(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):
            os.killpg(run.pid, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        with contextlib.suppress(OSError):
            os.killpg(run.pid, signal.SIGCONT)

    before = {name: signal.signal(signal.Signals[name], forward) for name in _FORWARDED}
    before["SIGTSTP"] = signal.signal(signal.SIGTSTP, pause)
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(signal.Signals[name], signal.SIG_DFL if handler is None else handler)


def _cause(code: int, *, is_hung: bool) -> tuple[str, str]:
    """Say what happened to a run, and give it a name."""
    if is_hung:
        return "did nothing any more and was ended", "hung"
    if code == -signal.SIGKILL:
        return "was ended by the system (signal 9), most likely because memory ran out", "killed"
    if code < 0:
        return f"crashed ({signal.Signals(-code).name})", "crashed"
    return f"failed (exit code {code})", "crashed"


def _last_step(folder: Path) -> int:
    """Read the last step of a run's log; -1 where there is none."""
    try:
        tail = (folder / "events.jsonl").read_bytes()[-65_536:]
    except OSError:
        return -1
    found = tail.rfind(b'"kind": "step", "step": ')
    digits = tail[found + 24 : found + 36].split(b",")[0] if found >= 0 else b""
    return int(digits) if digits.isdigit() else -1


def _halved(folder: Path) -> int | None:
    """Give half of the tokens that are computed at once, on a CPU, whose memory is the system's."""
    plan = read_plan(folder)
    if plan.device.value != "cpu":
        return None
    limits = [entry.micro_batch_tokens for entry in read_healing(folder) if entry.micro_batch_tokens]
    return max(1, (limits[-1] if limits else plan.micro_batch_tokens.value) // 2)


def _write(
    folder: Path, step: int, name: str, action: ActionName, words: str, micro_batch_tokens: int | None = None
) -> None:
    entry = HealingEntry(step, name, "fault", action, words, micro_batch_tokens=micro_batch_tokens)
    with EventLog(folder / HEALING) as log:
        log.append(entry.as_json())


def _where(folder: Path) -> str:
    stacks = folder / STACKS
    has_stacks = stacks.is_file() and stacks.stat().st_size
    return f"; what it was doing is in `{stacks}`" if has_stacks else ""
