"""Read run folders: plan, events, outcome, report, lock and activity; and the list of runs. No torch.

A file that is missing or damaged is empty, so a run can be read at any time: while it starts, trains, or after a crash.
Code that needs an error instead reads the record: `read_plan`, `find_outcome`, `read_report`.
"""

import math
import os
import re
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

from tunewell.core.errors import UserError, close_names, did_you_mean
from tunewell.core.files import Owner, open_file, read_bytes, running_owner
from tunewell.records.events import parse_object, plain, with_numbers
from tunewell.records.plan import PLAN
from tunewell.records.report import REPORT
from tunewell.records.rundir import CRASH, LOCK, OUTCOME, PULSE, RUN_CONFIG

EVENTS = "events.jsonl"
_TAIL_BYTES, _MORE_BYTES, _ALL_BYTES = 8192, 1 << 16, 1 << 22
"""Enough for the end of a report, where its verdict is; for the last steps of a run; and for its evaluations."""
_HELD_OUT = b'\n{"kind": "held_out"'
_VERDICT = re.compile(rb'\n  "verdict": "([A-Z]+)"')
_MAX_DEPTH = 4
_SKIPPED = frozenset({"checkpoints", "node_modules", "__pycache__", "export", "site-packages"})
_HIGH_FIRST = frozenset({"when", "tokens_per_second", "steps"})
COLUMNS = (
    *("run", "status", "verdict", "held_out", "loss", "steps", "planned_steps", "tokens_per_second", "when"),
    *("model", "method", "data", "note"),
)
"""The values of a run in a list. Unknown ones are None."""


class StoredRun:
    """A run, read from its folder. Each file is read once, when it is first needed; a new object reads it again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = str(folder)
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

    @property
    def ended(self) -> dict[str, Any]:
        """The outcome, unless the run was started again since."""
        return {} if self.owner else self.outcome

    @cached_property
    def activity(self) -> dict[str, Any]:
        """The stage or the step in progress, with its forward passes."""
        return read_object(self.folder / PULSE)

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """The last events, with which an outcome agrees."""
        lines = _read_end(self.folder / EVENTS, _TAIL_BYTES if self.ended else _MORE_BYTES).split(b"\n")
        return [event for line in lines if (event := parse_object(line)) is not None]  # the first line may be cut

    @cached_property
    def step_events(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event.get("kind") == "step"]

    @property
    def last_step(self) -> dict[str, Any]:
        return self.step_events[-1] if self.step_events else {}

    @property
    def crash(self) -> Path | None:
        """The file with the traceback that ended the run."""
        return self.folder / CRASH if (self.folder / CRASH).is_file() else None

    @property
    def has_report(self) -> bool:
        return (self.folder / REPORT).is_file()

    @property
    def seconds(self) -> float | None:
        """How long the run took."""
        return value_in(self.outcome, "measured", "seconds") or value_in(self.outcome, "seconds")

    @property
    def status(self) -> str:
        """`running`, `killed`, `unreadable`, or the status in `outcome.json`: `finished`, `interrupted`, ..."""
        if self.is_running:
            return "running"
        return str(self.ended.get("status") or ("killed" if self.plan or self.owner else "unreadable"))

    @property
    def note(self) -> str | None:
        """Why the run is not running or not readable."""
        if self.is_running:
            return str(self.owner)
        if self.owner:
            return "its process ended without writing a result"
        if self.outcome.get("status"):
            return value_in(self.outcome, "reason", kind=str)
        return f"it has no `{OUTCOME}`" if self.plan else f"`{PLAN}` is missing or damaged"

    @cached_property
    def verdict(self) -> str | None:
        # Reports have all answers and can be large. Keys are sorted, so the verdict is near the end.
        found = _VERDICT.findall(_read_end(self.folder / REPORT, _TAIL_BYTES))
        return found[-1].decode() if found else value_in(read_object(self.folder / REPORT), "verdict", kind=str)

    @cached_property
    def held_out(self) -> float | None:
        """The lowest held-out loss."""
        if self.ended:
            return value_in(self.ended, "held_out", "best")
        # Only these lines are parsed: those of steps are many.
        parts = (b"\n" + _read_end(self.folder / EVENTS, _ALL_BYTES)).split(_HELD_OUT)[1:]
        lines = [_HELD_OUT[1:] + part.partition(b"\n")[0] for part in parts]
        losses = [value_in(parse_object(line), "loss") for line in lines]
        return min((loss for loss in losses if loss is not None and math.isfinite(loss)), default=None)

    @property
    def loss(self) -> float | None:
        """The last training loss."""
        return value_in(self.ended, "last_loss") if self.ended else value_in(self.last_step, "loss")

    @property
    def steps(self) -> int | None:
        return value_in(self.ended, "steps", kind=int) if self.ended else value_in(self.last_step, "step", kind=int)

    @property
    def planned_steps(self) -> int | None:
        return value_in(self.plan, "num_steps", "value", kind=int)

    @property
    def tokens_per_second(self) -> float | None:
        """The speed of the last steps. The first step of a run is left out: it is slower."""
        steps = self.step_events
        steps = steps[1:] if len(steps) > 1 and steps[0].get("step") == 1 else steps
        tokens, seconds = (sum(value_in(step, name) or 0.0 for step in steps) for name in ("tokens", "seconds"))
        return tokens / seconds if seconds else None

    @cached_property
    def when(self) -> float:
        """Time of the last change, in seconds since 1970; 0 if there is no file."""
        return max(modified_at(self.folder / name) or 0.0 for name in (OUTCOME, REPORT, EVENTS, PLAN))

    @property
    def model(self) -> str | None:
        return value_in(self.plan, "model", kind=str)

    @property
    def method(self) -> str | None:
        return value_in(self.plan, "method", "value", kind=str)

    @property
    def data(self) -> str | None:
        sources = value_in(self.plan, "config", "data", "sources", kind=list) or []
        names = [PurePath(path).name for source in sources if (path := value_in(source, "path", kind=str))]
        if not names:
            return value_in(self.plan, "corpus", kind=str)
        return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")

    def as_json(self) -> dict[str, Any]:
        """Return the run as a JSON object; losses that are not finite are strings."""
        when = datetime.fromtimestamp(self.when).astimezone().isoformat("T", "seconds")
        return plain({name: getattr(self, name) for name in COLUMNS}) | {"when": when}


def is_run_folder(names: Collection[str]) -> bool:
    """Return whether a folder with these names is a run; `tunewell plan --json > plan.json` makes none."""
    return (PLAN in names and not {EVENTS, RUN_CONFIG}.isdisjoint(names)) or (EVENTS in names and LOCK in names)


def find_runs(folder: Path) -> Iterator[Path]:
    """Yield the run folders in a folder, down to four levels. A folder that cannot be read is skipped."""
    for here, folders, files in os.walk(folder):
        names, path = {*folders, *files}, Path(here)
        if is_run_folder(names):
            yield path
            folders.clear()
        elif len(path.relative_to(folder).parts) >= _MAX_DEPTH:
            folders.clear()
        else:
            folders[:] = [name for name in folders if name not in _SKIPPED and not name.startswith(".")]


def list_runs(
    folder: Path, *, filters: Sequence[str] = (), sort: str = "when", is_reversed: bool = False
) -> list[StoredRun]:
    """Return the runs in a folder. `filters` are `COLUMN=TEXT`, which a value must contain, in any case of letters.

    Sorted by a column: the newest, the lowest loss, the fastest first. Raises UserError for an unknown column.
    """
    if not folder.is_dir():
        raise UserError(f"there is no folder `{folder}`", fix="name a folder with runs, or a run")
    require_column(sort, "--sort")
    wanted: list[tuple[str, str]] = []
    for text in filters:
        name, equals, value = text.partition("=")
        if not equals:
            fix = "write COLUMN=TEXT, like `status=finished`"
            raise UserError(f"`{text}` is not a filter", where="--filter", fix=fix)
        require_column(name, "--filter")
        wanted.append((name, value.casefold()))
    runs = [StoredRun(run) for run in find_runs(folder)]
    runs = [run for run in runs if all(value in str(getattr(run, name) or "").casefold() for name, value in wanted)]
    return sorted_runs(runs, sort, is_reversed=is_reversed)


def sorted_runs(runs: Sequence[StoredRun], sort: str, *, is_reversed: bool) -> list[StoredRun]:
    """Return runs sorted by a column. Those without a value come last."""
    known = [run for run in runs if (value := getattr(run, sort)) is not None and value == value]  # NaN is unknown
    known.sort(key=lambda run: getattr(run, sort), reverse=(sort in _HIGH_FIRST) != is_reversed)
    return known + sorted(set(runs).difference(known), key=lambda run: run.run)


def require_column(name: str, option: str) -> None:
    """Raise UserError if there is no such column."""
    if name not in COLUMNS:
        fix = did_you_mean(close_names(name, COLUMNS), ", ".join(COLUMNS))
        raise UserError(f"there is no column `{name}`", where=option, fix=fix)


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


def modified_at(path: Path) -> float | None:
    """Return when a file was changed, in seconds since 1970; None if there is no such file."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None
