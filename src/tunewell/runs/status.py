"""The status of one run, read without torch: is it alive, what does it do, and when did it last make progress?"""

import os
import re
import shlex
import signal
import socket
import time
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.files import is_locked, stable_json, write_atomic
from tunewell.core.units import count, duration
from tunewell.records.plan import PLAN
from tunewell.records.rundir import LOCK, RUN_CONFIG, STOP
from tunewell.runs.hang_monitor import process_cpu_seconds
from tunewell.runs.state import EVENTS, StoredRun, is_run_folder, modified_at, read_object, value_in

_SAMPLE_SECONDS = 0.5
_STACK_POLLS = 30
"""The stacks are complete if two reads, 0.1 s apart, return the same."""
_SLOW_FACTOR = 3.0
"""A step that takes this many times longer than the median step is called slow."""
_IDLE_SHARE = 0.01
_RECENT_STEPS = 32
_MORE_COLUMNS = (
    *("state", "pid", "stage", "cpu_seconds", "cpu_share", "step_seconds", "since_event", "last_event", "stacks"),
)


class RunStatus(StoredRun):
    """The state of a run and of its process. Unknown values are None."""

    def __init__(self, folder: Path, *, with_stacks: bool = False, is_quick: bool = False) -> None:
        """Read a run. For a running one, this takes half a second, because its CPU time is measured.

        `is_quick` leaves that out. `with_stacks` makes the process dump the stack of each thread; raises UserError if
        it cannot.
        """
        super().__init__(folder)
        is_here = self.is_running and self.owner and self.owner.host == socket.gethostname()
        self.pid = self.owner.pid if is_here and self.owner else None
        if with_stacks and self.pid is None:
            raise UserError(
                f"the run `{folder}` has no running process on this machine",
                where=self.note,
                fix="`tunewell runs RUN` shows its state",
            )
        steps = [seconds for step in self.step_events[-_RECENT_STEPS:] if (seconds := value_in(step, "seconds"))]
        self.step_seconds = median(steps) if steps else None
        """Median time of the last steps."""
        self.cpu_seconds, self.cpu_share = _cpu(self.pid) if self.pid and not is_quick else (None, None)
        """CPU time of its process since it started, and current CPU time per second: 2.0 means two busy cores."""
        logged_at = modified_at(folder / EVENTS)
        self.since_event = max(0.0, time.time() - logged_at) if logged_at else None
        """Seconds since the last line in `events.jsonl`."""
        last = self.events[-1] if self.events else {}
        self.last_event = {key: value for key, value in last.items() if key not in ("phases", "batch_sha256")}
        self.stacks = dump_stacks(self.pid) if with_stacks and self.pid else None

    @cached_property
    def state(self) -> str:
        """One sentence: whether the run computes, waits or has ended."""
        if not self.is_running:
            note = (self.note or "").removeprefix(f"{self.status} ")  # "finished all 60 steps"
            return f"{self.status}: {note}" if note else self.status
        if self.pid is None:
            return f"running on {self.owner.host if self.owner else '?'}, which cannot be checked from here"
        since, usual = self.since_event, self.step_seconds
        is_late = since is not None and usual is not None and since > max(_SLOW_FACTOR * usual, 5.0)
        ago = f"the last line in `events.jsonl` is {duration(since)} old" if since is not None else "no step yet"
        is_idle = self.cpu_share is not None and self.cpu_share < _IDLE_SHARE and not _is_runnable(self.pid)
        if is_idle and (is_late or since is None):
            return (
                f"running, but it uses no CPU time now, and {ago}: it may hang, or wait for a GPU, a disk or a download"
            )
        if is_late and usual and not is_idle:
            return f"computing, but {ago}, and a step usually takes {duration(usual)}"
        return "running" if since is not None else "starting"

    @property
    def seconds_left(self) -> float | None:
        """An estimate of the time left, from the median step and the last evaluation; None if the run has ended."""
        steps, planned = self.steps, self.planned_steps
        if not self.is_running or steps is None or planned is None or self.step_seconds is None:
            return None
        every = max(1, value_in(self.plan, "evaluate_every", "value", kind=int) or planned)
        looks = [event for event in self.events if event.get("kind") == "held_out"]
        look = value_in(looks[-1], "seconds") or 0.0 if looks else 0.0
        left = (planned - steps) * self.step_seconds + (-(-planned // every) - steps // every) * look
        return max(0.0, left - min(self.since_event or 0.0, self.step_seconds))

    @property
    def stage(self) -> str | None:
        """The activity of a running run: a stage like `loading the model`, or its step and forward passes."""
        stage = value_in(self.activity, "stage", kind=str)
        passes, step = (value_in(self.activity, name, kind=int) for name in ("passes", "step"))
        if not self.is_running:
            return None
        if stage:
            return f"{stage} ({count(passes, 'forward pass', 'forward passes')})" if passes else stage
        if passes is None or step is None:
            return None
        logged, usual = (value_in(self.last_step, name, kind=int) for name in ("step", "micro_batches"))
        if logged and logged > step:  # short steps: the pulse is a second old
            return f"step {count(logged + 1)}"
        if not passes:
            return f"step {count(step + 1)}"
        done = passes if usual is None else min(passes, usual)  # the update counts as passes too
        return f"step {count(step + 1)}, forward pass {count(done)}{f' of about {count(usual)}' if usual else ''}"

    def as_json(self) -> dict[str, Any]:
        """Return the status as a JSON object."""
        owner = str(self.owner) if self.owner else None
        return {**super().as_json(), "owner": owner, **{name: getattr(self, name) for name in _MORE_COLUMNS}}


def find_status(folder: Path, *, with_stacks: bool = False, is_quick: bool = False) -> RunStatus | None:
    """Return the status of a run, or None if the path is a folder without a run of its own."""
    names = [name for name in (PLAN, EVENTS, RUN_CONFIG) if (folder / name).exists()]
    if EVENTS in names or is_run_folder(names):
        return RunStatus(folder, with_stacks=with_stacks, is_quick=is_quick)
    if with_stacks:
        raise UserError(f"`{folder}` is not a run", fix="name a run folder; `tunewell runs` lists runs")
    return None


def _cpu(pid: int) -> tuple[float | None, float | None]:
    """Return the CPU time of a process, and its CPU time per second now."""
    first, started = process_cpu_seconds(pid), time.monotonic()
    if first is None:
        return None, None
    time.sleep(_SAMPLE_SECONDS)
    last = process_cpu_seconds(pid)
    return last, None if last is None else round((last - first) / (time.monotonic() - started), 2)


def _is_runnable(pid: int) -> bool:
    """Return whether a thread of a process computes or waits for a core. On a busy machine it may get none for long."""
    for file in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            if file.read_bytes().rpartition(b")")[2].split()[0] == b"R":
                return True
        except (OSError, IndexError):
            continue
    return False


def stop_run(folder: Path) -> str:
    """Ask a run to stop, as Ctrl-C does: it finishes its step, saves a checkpoint and ends. Return what was done.

    Raises UserError if it is not running, or runs elsewhere. A second request is not sent: it would end the run at
    once, without a checkpoint.
    """
    run, asked = StoredRun(folder), folder / STOP
    owner, name = run.owner, shlex.quote(str(folder))
    if owner is None or not run.is_running or (owner.host == socket.gethostname() and not is_locked(folder / LOCK)):
        what = f"the run `{folder}` is not running"
        raise UserError(what, where=run.note, fix=f"`tunewell runs {name}` shows its state")
    if owner.host != socket.gethostname():
        fix = f"run `tunewell runs {name} --stop` on that machine"
        raise UserError(f"the run `{folder}` runs on `{owner.host}`, and can be stopped only there", fix=fix)
    ending = f"process {owner.pid} finishes its step, saves a checkpoint and ends"
    if read_object(asked) == asdict(owner):
        return f"the run was asked to stop before: {ending}"
    supervisor = value_in(run.activity, "supervisor", kind=int)
    is_of_owner = value_in(run.activity, "pid", kind=int) == owner.pid
    try:
        # Without its supervisor, a run that has not reached its first step would be started again.
        os.kill(supervisor if supervisor and is_of_owner else owner.pid, signal.SIGTERM)
    except PermissionError as error:
        raise UserError(f"the run `{folder}` belongs to another user, who can stop it", where=str(owner)) from error
    write_atomic(asked, stable_json(asdict(owner)))
    return f"the run was asked to stop: {ending}"


def dump_stacks(pid: int) -> str:
    """Make a supervised run dump the stack of each thread, and return the text. Raises UserError if it cannot.

    The run writes to a file that only its supervisor has open; Linux shows it under `/proc`.
    """
    fix = f"install py-spy and run `py-spy dump --pid {pid}`"
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        fds = next(words[index + 1] for index, word in enumerate(words[:-1]) if word in (b"--worker", b"--supervised"))
        file = Path(f"/proc/{pid}/fd/{fds.decode().split(',')[2]}")
        caught = re.search(r"SigCgt:\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text(encoding="utf-8"))
        # Without a handler, the signal would end the process.
        if caught is None or not int(caught[1], 16) >> (signal.SIGUSR2 - 1) & 1:
            raise UserError(
                "the run cannot dump its stacks yet: it is still importing", fix="try again in some seconds"
            )
        before = len(file.read_bytes())
        os.kill(pid, signal.SIGUSR2)
    except (OSError, StopIteration, IndexError) as error:
        raise UserError(
            "the stacks of this run cannot be read: it has no supervisor, or this system is not Linux", fix=fix
        ) from error
    text = b""
    for _ in range(_STACK_POLLS):
        time.sleep(0.1)
        known, text = text, file.read_bytes()[before:]
        if text and text == known:
            break
    if text:
        return text.decode("utf-8", "replace").strip()
    raise UserError("the run did not dump its stacks in time: its process is stopped or waits for a device", fix=fix)
