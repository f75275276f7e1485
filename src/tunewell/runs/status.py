"""The status of one run, read without torch: is it alive, what does it do, and when did it last make progress?"""

import math
import os
import re
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.files import Owner, running_owner
from tunewell.core.units import count, duration
from tunewell.records.plan import PLAN
from tunewell.records.rundir import LOCK, PULSE
from tunewell.runs.hang_monitor import process_cpu_seconds
from tunewell.runs.listing import RunSummary, read_object, summarise, tail_events

_SAMPLE_SECONDS = 0.5
_STACK_SECONDS = 3.0
_SLOW_FACTOR = 3.0
"""A step that takes this many times longer than the median step is called slow."""
_IDLE_SHARE = 0.01


@dataclass(frozen=True)
class RunStatus:
    """The state of a run and of its process. Unknown values are None."""

    summary: RunSummary
    state: str
    """One sentence: whether the run computes, waits or has ended."""
    owner: str | None = None
    pid: int | None = None
    stage: str | None = None
    """The activity of the run: a stage like `loading the model`, or its step and forward passes."""
    cpu_seconds: float | None = None
    """CPU time of its process since it started."""
    cpu_share: float | None = None
    """CPU time per second, measured now: 2.0 are two busy cores."""
    step_seconds: float | None = None
    """Median time of the last steps."""
    since_event: float | None = None
    """Seconds since the last line in `events.jsonl`."""
    last_event: dict[str, Any] = field(default_factory=dict)
    stacks: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the status as a JSON object."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "summary"}
        return {**self.summary.as_json(), **values}


def find_status(run: Path, *, with_stacks: bool = False) -> RunStatus | None:
    """Return the status of a run, or None if the path is a folder without a run of its own."""
    if not (run / PLAN).exists() and not (run / "events.jsonl").exists():
        if with_stacks:
            raise UserError(f"`{run}` is not a run", fix="name a run folder; `tunewell runs` lists runs")
        return None
    return run_status(run, with_stacks=with_stacks)


def run_status(run: Path, *, with_stacks: bool = False) -> RunStatus:
    """Return the state of a run. It takes half a second for a running one, whose CPU time is measured.

    `with_stacks` makes the process dump the stack of each thread; raises UserError if it cannot.
    """
    summary = summarise(run)
    owner, is_running = running_owner(run / LOCK)
    events = tail_events(run / "events.jsonl")
    seconds = [event["seconds"] for event in events if _is_step(event) and event["seconds"]]
    step_seconds = median(seconds) if seconds else None
    since = _age(run / "events.jsonl")
    here = owner if is_running and owner is not None and owner.host == socket.gethostname() else None
    cpu, share = _cpu(here.pid) if here else (None, None)
    is_idle = here is not None and share is not None and share < _IDLE_SHARE and not _is_runnable(here.pid)
    if with_stacks and here is None:
        raise UserError(
            f"the run `{run}` has no running process on this machine",
            where=summary.note,
            fix="`tunewell runs RUN` shows its state",
        )
    return RunStatus(
        summary=summary,
        state=_state(summary, owner if is_running else None, is_idle=is_idle, since=since, step_seconds=step_seconds),
        owner=str(owner) if owner else None,
        pid=here.pid if here else None,
        stage=_stage(run, events) if is_running else None,
        cpu_seconds=cpu,
        cpu_share=share,
        step_seconds=step_seconds,
        since_event=since,
        last_event=_without_details(events[-1]) if events else {},
        stacks=dump_stacks(here.pid) if with_stacks and here else None,
    )


def _is_step(event: dict[str, Any]) -> bool:
    return event.get("kind") == "step" and isinstance(event.get("seconds"), int | float)


def _age(path: Path) -> float | None:
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
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


def _state(
    summary: RunSummary, owner: Owner | None, *, is_idle: bool, since: float | None, step_seconds: float | None
) -> str:
    if owner is None:
        note = (summary.note or "").removeprefix(f"{summary.status} ")  # "finished all 60 steps"
        return f"{summary.status}: {note}" if note else summary.status
    if owner.host != socket.gethostname():
        return f"running on {owner.host}, which cannot be checked from here"
    is_late = since is not None and step_seconds is not None and since > max(_SLOW_FACTOR * step_seconds, 5.0)
    ago = f"the last line in `events.jsonl` is {duration(since)} old" if since is not None else "no step yet"
    if is_idle:
        if not is_late and since is not None:
            return "running"
        return f"running, but it uses no CPU time now, and {ago}: it may hang, or wait for a GPU, a disk or a download"
    if is_late and step_seconds:
        return f"computing, but {ago}, and a step usually takes {duration(step_seconds)}"
    return "running" if since is not None else "starting"


def _stage(run: Path, events: list[dict[str, Any]]) -> str | None:
    """Return what `.pulse` says: a stage, or the step in progress with its forward passes."""
    pulse = read_object(run / PULSE) or {}
    passes, step = pulse.get("passes"), pulse.get("step")
    if pulse.get("stage"):
        return f"{pulse['stage']} ({count(passes, 'forward pass', 'forward passes')})" if passes else pulse["stage"]
    if not isinstance(passes, int) or not isinstance(step, int):
        return None
    last = next((event for event in reversed(events) if _is_step(event)), {})
    if isinstance(last.get("step"), int) and last["step"] > step:  # short steps: the pulse is a second old
        return f"step {count(last['step'] + 1)}"
    usual = last.get("micro_batches")
    passes = min(passes, usual) if isinstance(usual, int) else passes  # the update counts as passes too
    of = f" of about {count(usual)}" if isinstance(usual, int) else ""
    return f"step {count(step + 1)}, forward pass {count(passes)}{of}" if passes else f"step {count(step + 1)}"


def _without_details(event: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in event.items() if key not in ("phases", "batch_sha256") and not _is_nan(value)}


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


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
    deadline = time.monotonic() + _STACK_SECONDS
    text = ""
    while time.monotonic() < deadline:
        time.sleep(0.1)
        new = file.read_bytes()[before:].decode("utf-8", "replace")
        if new and new == text:
            return new.strip()
        text = new
    if text:
        return text.strip()
    raise UserError("the run did not dump its stacks in time: its process is stopped or waits for a device", fix=fix)
