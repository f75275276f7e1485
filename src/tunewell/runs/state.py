"""The one reader of a run's folder: plan, events, healing, samples, outcome, lock and activity, without torch.

A file that is missing or damaged is empty, so a run can be read at any time: while it starts, trains, or after a crash.
Whoever needs an error instead reads the record: `read_plan`, `find_outcome`, `read_report`.
"""

import os
import re
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson

from tunewell.core.files import Owner, open_file, read_bytes, running_owner
from tunewell.records.events import with_numbers
from tunewell.records.plan import PLAN
from tunewell.records.report import REPORT
from tunewell.records.rundir import CRASH, LOCK, OUTCOME, PULSE

EVENTS = "events.jsonl"
_TAIL_BYTES, _ALL_BYTES = 8192, 1 << 22
"""Enough for the last steps of a run, and for the end of a report, where its verdict is."""
_VERDICT = re.compile(rb'\n  "verdict": "([A-Z]+)"')


def is_run(folder: Path) -> bool:
    """Return whether a folder has the plan or the log of a run."""
    return (folder / PLAN).exists() or (folder / EVENTS).exists()


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
        is_over = self.owner is None and self.outcome
        return self.log().last(_TAIL_BYTES if is_over else _ALL_BYTES)

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event.get("kind") == "step"]

    def log(self, name: str = EVENTS) -> "Log":
        """Return a log of the run: `events.jsonl`, `healing.jsonl` or `samples.jsonl`."""
        return Log(self.folder / name)

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
        found = _VERDICT.findall(_read(self.folder / REPORT, -_TAIL_BYTES))
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


class Log:
    """A log of one JSON object per line. It can be followed while it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset, self._line = 0, b""
        """The last line that was read, and where it begins."""

    def new(self) -> list[dict[str, Any]]:
        """Return the events added since the last call, or all of a log that a rewind or a resume has cut meanwhile."""
        data = _read(self._path, self._offset)
        if not data.startswith(self._line):
            self._offset, self._line, data = 0, b"", _read(self._path)
        added = data[len(self._line) : data.rfind(b"\n") + 1]
        if added:
            self._offset += len(self._line) + added[:-1].rfind(b"\n") + 1
            self._line = added[added[:-1].rfind(b"\n") + 1 :]
        return _parse(added)

    def last(self, num_bytes: int) -> list[dict[str, Any]]:
        """Return the intact events at the end."""
        return _parse(_read(self._path, -num_bytes))


def _parse(data: bytes) -> list[dict[str, Any]]:
    """Return the intact events. The first line may be cut, the last one incomplete."""
    events = []
    for line in data.split(b"\n"):
        try:
            event = orjson.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            events.append(event)
    return events


def read_object(path: Path) -> dict[str, Any]:
    """Return a JSON object, or an empty one if the file is missing, damaged or something else."""
    try:
        value = orjson.loads(read_bytes(path))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def value_in(record: Any, *keys: str, kind: Any = int | float) -> Any:
    """Return a value of a JSON object by its keys, or None if it is missing or of another kind. `"nan"` is a number."""
    for key in keys:
        record = record.get(key) if isinstance(record, dict) else None
    value = record if kind is str else with_numbers(record)
    return value if isinstance(value, kind) else None


def _read(path: Path, start: int = 0) -> bytes:
    """Return the content of a file from `start`, which counts from the end if it is negative."""
    try:
        with open_file(path) as file:
            file.seek(max(start, -os.fstat(file.fileno()).st_size), os.SEEK_END if start < 0 else os.SEEK_SET)
            return file.read()
    except OSError:
        return b""


def _modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
