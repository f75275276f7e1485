"""Supervise a training run from a parent process, and restart it if it is killed, crashes or hangs.

tunewell train                    the supervisor: no torch, no lock, a few megabytes
  tunewell train --worker FDS     the run; restarted with `--resume` if it dies
"""

import contextlib
import functools
import math
import os
import select
import shlex
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

# Nothing else is imported before the run is started: its own start takes seconds.
from tunewell.core.child import Process, start_in_group
from tunewell.core.errors import UserError
from tunewell.core.files import write_atomic
from tunewell.core.launcher import world_size
from tunewell.core.units import count
from tunewell.runs.hang_monitor import HangMonitor, process_cpu_seconds

if TYPE_CHECKING:
    from tunewell.config.rules import Healing
    from tunewell.records.healing import HealingEntry

STACKS = "stacks.txt"
"""The file with the stacks of all threads of a run that hung."""
EXIT_MACHINE = 1
_EXIT_PIPE = 141
_FINAL_CODES = frozenset({0, 2, 3, 4, 130, _EXIT_PIPE, 143})
"""Exit codes that need no restart: success, user error, WEAK, stopped by health, SIGINT, closed pipe, SIGTERM."""
_FORWARDED = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP")
_NO_PROGRESS_FACTOR = 2
"""Restarts without a new checkpoint are limited to this many times the restarts at one step."""
_STACK_DUMP_SECONDS = 2.0
_POLL_SECONDS = 0.2
_PAUSE_SECONDS = 5.0
"""A poll longer than this means that the supervisor itself was paused, by `docker pause` or a scheduler."""

CommandLine = Callable[[bool, str], Sequence[str]]
"""Builds the child's command line from `is_restart` and the file descriptors it inherits."""
RunSettings = Callable[[], tuple[Path, "Healing"]]
"""Returns the run's folder and its `healing` settings."""


def can_supervise() -> bool:
    """Return whether a run can be supervised here: not under torchrun, in a debugger or on Windows."""
    return os.name == "posix" and world_size() <= 1 and sys.gettrace() is None


def supervise(command_line: CommandLine, *, settings: RunSettings, report: Callable[[str], None]) -> int:
    """Run a training command, restart it if it dies, and return its exit code.

    A run is not restarted after a signal to stop, or if it dies before its first step. `healing.restarts` limits the
    restarts at one step; twice as many are allowed without a new checkpoint. `settings` is called while the run starts;
    if it raises UserError, the run reports the same error.
    """
    settings = functools.cache(settings)
    budget: _RestartBudget | None = None
    is_restart = False
    with _SignalForwarder() as signals:
        while True:
            code, has_hung = _run_child(command_line, is_restart=is_restart, settings=settings, signals=signals)
            if code in _FINAL_CODES and not has_hung:
                return code
            from tunewell.records.events import last_step
            from tunewell.records.healing import HealingEntry

            folder, rules = settings()
            budget = budget or _RestartBudget(folder, rules.restarts)
            step = last_step(folder / "events.jsonl") or 0
            name, cause = _how_it_died(code, has_hung=has_hung)
            message, stacks = f"the run {cause} after step {count(step)}", _stacks_hint(folder)
            if signals.exit_code is not None:
                if has_hung or code not in (-signal.SIGINT, -signal.SIGTERM, -signal.SIGUSR1):
                    report(f"while stopping, {message}{stacks}")
                return signals.exit_code
            num_deaths, exhausted = budget.add(step)
            if step < 1 or not rules.on:
                report(f"{message}{stacks}{_diagnose_hint(folder)}")
                return EXIT_MACHINE
            if exhausted:
                report(f"{message}, {exhausted}; not restarted{stacks}{_diagnose_hint(folder)}")
                _log(folder, HealingEntry(step, name, "fault", "stop", f"{cause}, {exhausted}; not restarted"))
                return EXIT_MACHINE
            halved = _halved_micro_batch(folder) if name == "killed" and num_deaths > 1 else None
            smaller = f" with {count(halved)} tokens per micro-batch" if halved else ""
            action = f"{cause}; restarted from the last checkpoint{smaller}"
            report(f"the run {action} (restart {count(num_deaths)} of {count(rules.restarts)}){stacks}")
            _log(folder, HealingEntry(step, name, "fault", "restart", action, micro_batch_tokens=halved))
            is_restart = True


def _how_it_died(code: int, *, has_hung: bool) -> tuple[str, str]:
    """Return how a run died: a name for `healing.jsonl` and a phrase for messages."""
    if has_hung:
        return "hung", "stopped responding and was killed"
    if code == -signal.SIGKILL:
        return "killed", "was killed by the system (signal 9), most likely because it ran out of memory"
    if code < 0:
        return "crashed", f"crashed ({signal.Signals(-code).name})"
    return "crashed", f"failed (exit code {code})"


class _RestartBudget:
    """A count of how often a run died at each step, and how often without a new checkpoint."""

    def __init__(self, folder: Path, restarts: int) -> None:
        self._folder = folder
        self._restarts = restarts
        self._deaths: Counter[int] = Counter()
        self._num_without_checkpoint = 0
        self._newest = -1

    def add(self, step: int) -> tuple[int, str]:
        """Add a death at a step. Return the deaths at that step, and the reason not to restart or an empty string."""
        from tunewell.records.checkpoint import saved_steps

        self._deaths[step] += 1
        newest = max(saved_steps(self._folder / "checkpoints"), default=-1)
        self._num_without_checkpoint = 1 if newest > self._newest else self._num_without_checkpoint + 1
        self._newest = max(self._newest, newest)
        if (num_deaths := self._deaths[step]) > self._restarts:
            return num_deaths, f"{count(num_deaths)} times at the same step"
        if self._num_without_checkpoint > _NO_PROGRESS_FACTOR * self._restarts:
            return num_deaths, f"{count(self._num_without_checkpoint)} times without a new checkpoint"
        return num_deaths, ""


def _run_child(
    command_line: CommandLine, *, is_restart: bool, settings: RunSettings, signals: "_SignalForwarder"
) -> tuple[int, bool]:
    """Start the run, wait for it, and kill it if it hangs. Return its exit code and whether it hung."""
    lifeline_read, lifeline_write = os.pipe()
    heartbeat_read, heartbeat_write = os.pipe()
    os.set_blocking(heartbeat_read, False)
    try:
        with tempfile.TemporaryFile() as stacks:
            inherited = (lifeline_read, heartbeat_write, stacks.fileno())
            child = start_in_group(command_line(is_restart, ",".join(map(str, inherited))), inherited=inherited)
            os.close(lifeline_read)
            os.close(heartbeat_write)
            monitor = HangMonitor(math.inf, lambda: process_cpu_seconds(child.pid))
            with signals.forwarded_to(child, monitor):
                with contextlib.suppress(UserError):
                    monitor.hang_seconds = settings()[1].hang_seconds
                has_hung = _wait(child, monitor, heartbeat_read)
            if has_hung:
                folder, _ = settings()
                _dump_stacks_and_kill(child)
                stacks.seek(0)
                write_atomic(folder / STACKS, stacks.read())
            if monitor.exit_code is not None:  # the run had finished; printing or exiting may have failed
                return monitor.exit_code, False
            return _EXIT_PIPE if child.returncode == -signal.SIGPIPE else child.returncode, has_hung
    finally:
        os.close(heartbeat_read)
        os.close(lifeline_write)


def _wait(child: Process, monitor: HangMonitor, heartbeat: int) -> bool:
    """Wait until the child exits or hangs. Return True if it hangs."""
    polled_at = time.monotonic()
    while child.poll() is None:
        has_data = bool(select.select([heartbeat], [], [], _POLL_SECONDS)[0])
        before, polled_at = polled_at, time.monotonic()
        if polled_at - before > _PAUSE_SECONDS:
            monitor.reset_timer()
        if has_data and not monitor.read(heartbeat):  # the child closed the pipe and is about to exit
            break
        if not has_data and monitor.is_overdue:
            return True
    child.wait()
    monitor.read(heartbeat)
    return False


def _dump_stacks_and_kill(child: Process) -> None:
    """Make a hung child dump the stacks of its threads, then kill its process group."""
    with contextlib.suppress(OSError):
        child.send_signal(signal.SIGUSR2)
    time.sleep(_STACK_DUMP_SECONDS)
    _signal_group(child, signal.SIGKILL)
    child.wait()


def _signal_group(child: Process | None, number: int) -> None:
    """Send a signal to the child's process group, if there is a child."""
    if child is not None:
        with contextlib.suppress(OSError):
            os.killpg(child.pid, number)


class _SignalForwarder:
    """Forwards signals to the child, and stores a stop request that arrives between two children."""

    def __init__(self) -> None:
        self.exit_code: int | None = None
        """The exit code of the command after a stop request; None before."""
        self._requested: int | None = None
        self._child: Process | None = None
        self._monitor: HangMonitor | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "_SignalForwarder":
        handlers = dict.fromkeys((signal.Signals[name] for name in _FORWARDED), self._on_stop)
        handlers[signal.SIGTSTP] = self._on_pause
        for number, handler in handlers.items():
            # An ignored signal stays ignored: `nohup` ignores SIGHUP. SIGINT is the exception: shells start background
            # jobs with SIGINT ignored, but a SIGINT sent to this process is meant for the run.
            if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, handler)
        # Inherited by the child. Under `stty tostop`, a background group would be stopped when it prints.
        self._previous[signal.SIGTTOU] = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    @contextlib.contextmanager
    def forwarded_to(self, child: Process, monitor: HangMonitor) -> Iterator[None]:
        """Forward signals to this child, including one that arrived while it was being started."""
        self._child, self._monitor = child, monitor
        try:
            if self._requested is not None:
                self._forward(self._requested)
            yield
        finally:
            self._child = self._monitor = None

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            # The shell and the kernel both send SIGHUP; a second request would make the run exit without saving.
            if self._requested is not None:
                return
            number = signal.SIGTERM
        self._requested, self.exit_code = number, 130 if number == signal.SIGINT else 143
        self._forward(number)

    def _forward(self, number: int) -> None:
        if self._child is not None:
            with contextlib.suppress(OSError):
                self._child.send_signal(number)
            _signal_group(self._child, signal.SIGCONT)  # a stopped process would not handle the signal

    def _on_pause(self, number: int, frame: FrameType | None) -> None:
        """Stop the child and this process until this process is continued."""
        _signal_group(self._child, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        _signal_group(self._child, signal.SIGCONT)
        if self._monitor is not None:
            self._monitor.reset_timer()


def _halved_micro_batch(folder: Path) -> int | None:
    """Return half of the current micro-batch tokens for a run on a CPU, which uses system memory; otherwise None."""
    from tunewell.records.healing import read_healing
    from tunewell.records.plan import read_plan

    plan = read_plan(folder)
    if plan.device.value != "cpu":
        return None
    limits = [entry.micro_batch_tokens for entry in read_healing(folder) if entry.micro_batch_tokens]
    return max(1, (limits[-1] if limits else plan.micro_batch_tokens.value) // 2)


def _log(folder: Path, entry: "HealingEntry") -> None:
    from tunewell.records.events import EventLog
    from tunewell.records.healing import HEALING

    with EventLog(folder / HEALING) as log:
        log.append(entry.as_json())


def _diagnose_hint(folder: Path) -> str:
    """Return the next command, if the run has left anything to read."""
    return f"\nnext: `tunewell diagnose {shlex.quote(str(folder))}`" if (folder / "events.jsonl").is_file() else ""


def _stacks_hint(folder: Path) -> str:
    stacks = folder / STACKS
    has_stacks = stacks.is_file() and stacks.stat().st_size
    return f"; the stack of each thread is in `{stacks}`" if has_stacks else ""
