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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from tunewell.config.rules import Healing
from tunewell.core.units import count
from tunewell.records.checkpoint import checkpoint_step
from tunewell.records.events import EventLog
from tunewell.records.healing import HEALING, ActionName, HealingEntry, read_healing
from tunewell.records.plan import read_plan
from tunewell.runs.heartbeat import HeartbeatMonitor

STACKS = "stacks.txt"
"""What every thread was doing when a run was found hanging."""
EXIT_MACHINE = 1
_EXIT_PIPE = 141
_FINAL_CODES = frozenset({0, 2, 3, 4, 130, _EXIT_PIPE, 143})
"""Ends that a run has chosen itself: done, refused, weak, stopped by health, asked to stop, nobody to print to."""
_FORWARDED = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP")
_FRUITLESS_FACTOR = 2
"""How many times more often than at one step a run may die without a new checkpoint: by then it is no bad luck."""
_SECONDS_FOR_STACKS = 2.0
_TURN_SECONDS = 0.2
_STOPPED_SECONDS = 5.0
"""A turn that took so much longer was a pause of the supervisor itself: docker pause, a scheduler's suspend."""


def can_supervise() -> bool:
    """Whether a run here can have a supervisor: a launcher is one itself, and Windows has no groups of processes."""
    return os.name == "posix" and int(os.environ.get("WORLD_SIZE", "1")) <= 1 and sys.gettrace() is None


def supervise(
    line: Callable[[bool, str], Sequence[str]], *, folder: Path, rules: Healing, tell: Callable[[str], None]
) -> int:
    """Run a training command until it ends by itself, starting it again where something ended it; give its exit code.

    `line(is_again, handles)` spells the command. Nothing is started again that was asked to stop or has not taken a
    step, nothing more often for the same step than the rules allow, and nothing for ever without a new checkpoint.
    """
    tries = _Tries(folder, rules.restarts)
    is_again = False
    with _Post() as post:
        while True:
            code, is_hung = _watch(line, is_again=is_again, rules=rules, folder=folder, post=post)
            if code in _FINAL_CODES and not is_hung:
                return code
            step = _last_step(folder)
            cause, name = _cause(code, is_hung=is_hung)
            after = f"{cause} after step {count(max(step, 0))}"
            if post.exit_code is not None:
                if is_hung or code not in (-signal.SIGINT, -signal.SIGTERM, -signal.SIGUSR1):
                    tell(f"asked to stop, the run {after}{_where(folder)}")
                return post.exit_code
            num_tries, enough = tries.add(step)
            if step < 1 or not rules.on:
                tell(f"the run {after}{_where(folder)}")
                return EXIT_MACHINE
            if enough:
                tell(f"the run {after}, {enough}{_where(folder)}")
                _write(folder, step, name, "stop", f"{cause}, {enough}; given up")
                return EXIT_MACHINE
            halved = _halved(folder) if name == "killed" and num_tries > 1 else None
            smaller = f", {count(halved)} tokens at once" if halved else ""
            words = f"{cause}: started again from the last checkpoint{smaller}"
            tell(f"the run {words} ({count(num_tries)} of {count(rules.restarts)} tries){_where(folder)}")
            _write(folder, step, name, "restart", words, micro_batch_tokens=halved)
            is_again = True


class _Tries:
    """Counts how often a run died: at each step, and without a new checkpoint."""

    def __init__(self, folder: Path, restarts: int) -> None:
        self._folder = folder
        self._restarts = restarts
        self._at: dict[int, int] = {}
        self._num_fruitless = 0
        self._newest = _newest_checkpoint(folder)

    def add(self, step: int) -> tuple[int, str]:
        """Count a death at a step; give how many it has seen, and why that is enough where it is."""
        self._at[step] = self._at.get(step, 0) + 1
        newest = _newest_checkpoint(self._folder)
        self._num_fruitless = 1 if newest > self._newest else self._num_fruitless + 1
        self._newest = max(self._newest, newest)
        enough = ""
        if self._at[step] > self._restarts:
            enough = f"{count(self._restarts)} times at the same step"
        elif self._num_fruitless > _FRUITLESS_FACTOR * self._restarts:
            enough = f"{count(self._num_fruitless)} times without a new checkpoint"
        return self._at[step], enough


def _watch(line: Any, *, is_again: bool, rules: Healing, folder: Path, post: "_Post") -> tuple[int, bool]:
    """Start the run and wait for its end; end it where it hangs. Gives the exit code and whether it hung."""
    life_read, life_write = os.pipe()
    pulse_read, pulse_write = os.pipe()
    os.set_blocking(pulse_read, False)
    ear = HeartbeatMonitor(rules.hang_seconds)
    try:
        with tempfile.TemporaryFile() as stacks:
            theirs = (life_read, pulse_write, stacks.fileno())
            run = subprocess.Popen(
                line(is_again, ",".join(map(str, theirs))),
                pass_fds=theirs,
                # A group of its own: a terminal's Ctrl-C comes here alone, and is handed on once. Such a group is
                # stopped where it reads from the terminal; rows from a pipe it may read.
                process_group=0,
                stdin=subprocess.DEVNULL if os.isatty(0) else None,
            )
            os.close(life_read)
            os.close(pulse_write)
            with post.to(run, ear):
                is_hung = _listen(run, ear, pulse_read)
            if is_hung:
                _end(run)
                stacks.seek(0)
                (folder / STACKS).write_bytes(stacks.read())
            if ear.ended is not None:  # whatever became of its last words, or of its leaving
                return ear.ended, False
            return _EXIT_PIPE if run.returncode == -signal.SIGPIPE else run.returncode, is_hung
    finally:
        os.close(pulse_read)
        os.close(life_write)


def _listen(run: "subprocess.Popen[Any]", ear: HeartbeatMonitor, pulse: int) -> bool:
    """Hear the run until it ends; say whether it hangs instead."""
    turned = time.monotonic()
    while run.poll() is None:
        is_said = bool(select.select([pulse], [], [], _TURN_SECONDS)[0])
        before, turned = turned, time.monotonic()
        if turned - before > _STOPPED_SECONDS:
            ear.begin_anew()
        if is_said and not ear.listen(pulse):  # it has closed its end, and is about to leave
            break
        if not is_said and ear.is_overdue:
            return True
    run.wait()
    ear.listen(pulse)  # what it said since the last turn
    return False


def _end(run: "subprocess.Popen[Any]") -> None:
    """Ask a run that hangs what it is doing, and end it."""
    with contextlib.suppress(OSError):
        run.send_signal(signal.SIGUSR2)
    time.sleep(_SECONDS_FOR_STACKS)
    with contextlib.suppress(OSError):
        os.killpg(run.pid, signal.SIGKILL)
    run.wait()


class _Post:
    """Hands signals on to the run while it is entered, and remembers that one asked to stop: also between two tries."""

    def __init__(self) -> None:
        self.exit_code: int | None = None
        """What the command ends with, once it was asked to stop."""
        self._asked: int | None = None
        self._run: subprocess.Popen[Any] | None = None
        self._ear: HeartbeatMonitor | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "_Post":
        handlers = dict.fromkeys((signal.Signals[name] for name in _FORWARDED), self._forward)
        handlers[signal.SIGTSTP] = self._pause
        for number, handler in handlers.items():
            # `nohup` means that a hang-up is no reason to stop. SIGINT is taken even so: every script starts what it
            # puts into the background with it ignored, and whoever then sends one means this run.
            if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, handler)
        # The run inherits it: not in the terminal's foreground, `stty tostop` would stop it at its first word.
        self._before[signal.SIGTTOU] = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    @contextlib.contextmanager
    def to(self, run: "subprocess.Popen[Any]", ear: HeartbeatMonitor) -> Iterator[None]:
        """Hand on to this run, also what came while it was being started."""
        self._run, self._ear = run, ear
        try:
            if self._asked is not None:
                self._hand_on(self._asked)
            yield
        finally:
            self._run = self._ear = None

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            if self._asked is not None:  # shell and system both tell of one hang-up; asked twice, a run does not save
                return
            number = signal.SIGTERM
        self._asked, self.exit_code = number, 130 if number == signal.SIGINT else 143
        self._hand_on(number)

    def _hand_on(self, number: int) -> None:
        if self._run is not None:
            with contextlib.suppress(OSError):
                self._run.send_signal(number)
                os.killpg(self._run.pid, signal.SIGCONT)  # stopped by whatever, it would not hear it

    def _pause(self, number: int, frame: FrameType | None) -> None:
        """Stop the run and this process, until somebody lets this process go on."""
        run, ear = self._run, self._ear
        if run is not None:
            with contextlib.suppress(OSError):
                os.killpg(run.pid, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        if run is not None and ear is not None:
            with contextlib.suppress(OSError):
                os.killpg(run.pid, signal.SIGCONT)
            ear.begin_anew()


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


def _newest_checkpoint(folder: Path) -> int:
    """Find the step of the newest checkpoint by its name; -1 where there is none."""
    try:
        steps = [checkpoint_step(entry.name) for entry in (folder / "checkpoints").iterdir()]
    except OSError:
        return -1
    return max((step for step in steps if step is not None), default=-1)


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
