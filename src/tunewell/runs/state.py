"""The one reader of a run's folder: plan, events, healing, samples, outcome, lock and activity, without torch.

A file that is missing or damaged is empty, so a run can be read at any time: while it starts, trains, or after a crash.
Whoever needs an error instead reads the record: `read_plan`, `find_outcome`, `read_report`.
"""

import os
import re
from functools import cached_property
from pathlib import Path
from typing import Any

from tunewell.core.files import Owner, open_file, read_bytes, running_owner
from tunewell.records.events import parse_object, with_numbers
from tunewell.records.plan import PLAN
from tunewell.records.report import REPORT
from tunewell.records.rundir import CRASH, LOCK, OUTCOME, PULSE

EVENTS = "events.jsonl"
_TAIL_BYTES, _ALL_BYTES = 8192, 1 << 22
"""Enough for the last steps of a run, and for the end of a report, where its verdict is."""
_VERDICT = re.compile(rb'\n  "verdict": "([A-Z]+)"')


class StoredRun:
    """The files of a run, each read when it is first needed. Another object sees what was written since."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.owner: Owner | None
        """The process that holds the lock, or held it when it was killed."""
        self.owner, self.is_running = running_owner(folder / LOCK)

    @cached_property
    def plan(self) -> dict[str, Any]:
        return read_object(self.folder / PLAN)

    @cached_property
    def outcome(self) -> dict[str, Any]:
        """The outcome of the last start that ended by itself."""
        return read_object(self.folder / OUTCOME)

    @cached_property
    def activity(self) -> dict[str, Any]:
        """The stage or the step in progress, with its forward passes."""
        return read_object(self.folder / PULSE)

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """The last events, with which an outcome agrees; of a run without one, as good as all of them."""
        size = _TAIL_BYTES if self.owner is None and self.outcome else _ALL_BYTES
        lines = _read_end(self.folder / EVENTS, size).split(b"\n")  # the first one may be cut
        return [event for line in lines if (event := parse_object(line)) is not None]

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event.get("kind") == "step"]

    @property
    def crash(self) -> Path | None:
        """The file with the traceback that ended the run."""
        return self.folder / CRASH if (self.folder / CRASH).is_file() else None

    @property
    def has_report(self) -> bool:
        return (self.folder / REPORT).is_file()

    @property
    def verdict(self) -> str | None:
        # Reports have all answers and can be large. Keys are sorted, so the verdict is near the end.
        found = _VERDICT.findall(_read_end(self.folder / REPORT, _TAIL_BYTES))
        return found[-1].decode() if found else value_in(read_object(self.folder / REPORT), "verdict", kind=str)

    @property
    def status(self) -> str:
        """`running`, `killed`, `unreadable`, or the status in `outcome.json`: `finished`, `interrupted`, ..."""
        if self.is_running:
            return "running"
        ended = None if self.owner else self.outcome.get("status")
        return str(ended or ("killed" if self.plan or self.owner else "unreadable"))

    @property
    def changed_at(self) -> float:
        """Time of the last change, in seconds since 1970; 0 if there is no file."""
        files = (self.folder / name for name in (OUTCOME, REPORT, EVENTS, PLAN))
        return max((time for file in files if (time := _modified(file))), default=0.0)

    @property
    def logged_at(self) -> float | None:
        """Time of the last line of `events.jsonl`."""
        return _modified(self.folder / EVENTS)

    @property
    def seconds(self) -> float | None:
        """How long the run took."""
        return value_in(self.outcome, "measured", "seconds") or value_in(self.outcome, "seconds")


def read_object(path: Path) -> dict[str, Any]:
    """Return a JSON object, or an empty one if the file is missing, damaged or something else."""
    try:
        return parse_object(read_bytes(path)) or {}
    except OSError:
        return {}


def value_in(record: Any, *keys: str, kind: Any = int | float) -> Any:
    """Return a value of a JSON object by its keys, or None if it is missing or of another kind. `"nan"` is a number."""
    for key in keys:
        record = record.get(key) if isinstance(record, dict) else None
    value = record if kind is str else with_numbers(record)
    return value if isinstance(value, kind) else None


def _read_end(path: Path, num_bytes: int) -> bytes:
    """Return the last bytes of a file; none if it cannot be read."""
    try:
        with open_file(path) as file:
            file.seek(-min(num_bytes, os.fstat(file.fileno()).st_size), os.SEEK_END)
            return file.read()
    except OSError:
        return b""


def _modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
