"""List the runs in a folder: status, losses, verdict and speed of each, read from its files without torch.

A damaged or unfinished run is listed with what can be read; it never raises.
"""

import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path, PurePath
from typing import Any

import orjson

from tunewell.core.errors import UserError, close_names, did_you_mean
from tunewell.core.files import open_file, read_bytes, running_owner
from tunewell.records.events import as_number
from tunewell.records.plan import PLAN
from tunewell.records.report import REPORT
from tunewell.records.rundir import LOCK, OUTCOME

_MAX_DEPTH = 4
_SKIPPED = frozenset({"checkpoints", "node_modules", "__pycache__", "export", "site-packages"})
_TAIL_BYTES, _ALL_BYTES = 8192, 1 << 22
"""Enough for the last steps of a run, and for the end of a report, where its verdict is."""
_VERDICT = re.compile(rb'\n  "verdict": "([A-Z]+)"')


@dataclass(frozen=True)
class RunSummary:
    """One run in a list. Unknown values are None."""

    run: str
    """The path of the run folder."""
    status: str
    """`running`, `killed`, `unreadable`, or the status in `outcome.json`: `finished`, `interrupted`, ..."""
    verdict: str | None = None
    held_out: float | None = None
    """The lowest held-out loss."""
    loss: float | None = None
    """The last training loss."""
    steps: int | None = None
    planned_steps: int | None = None
    tokens_per_second: float | None = None
    when: float = 0.0
    """Time of the last change, in seconds since 1970."""
    model: str | None = None
    method: str | None = None
    data: str | None = None
    note: str | None = None
    """Why the run is not running or not readable."""

    def as_json(self) -> dict[str, Any]:
        """Return the run as a JSON object; losses that are not finite are strings."""
        values = asdict(self) | {"when": datetime.fromtimestamp(self.when).astimezone().isoformat("T", "seconds")}
        return {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }


COLUMNS = tuple(RunSummary.__dataclass_fields__)


def find_runs(folder: Path) -> Iterator[Path]:
    """Yield the run folders in a folder, down to four levels. A folder that cannot be read is skipped."""
    waiting = [(folder, 0)]
    while waiting:
        here, depth = waiting.pop()
        try:
            with os.scandir(here) as found:
                entries = list(found)
        except OSError:
            continue
        names = {entry.name for entry in entries}
        if PLAN in names or ("events.jsonl" in names and LOCK in names):
            yield here
        elif depth < _MAX_DEPTH:
            waiting += [
                (Path(entry.path), depth + 1)
                for entry in entries
                if entry.name not in _SKIPPED and not entry.name.startswith(".") and _is_folder(entry)
            ]


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def summarise(run: Path) -> RunSummary:
    """Read one run. A file that is missing or damaged leaves its values unknown."""
    plan, outcome = read_object(run / PLAN), read_object(run / OUTCOME)
    owner, is_running = running_owner(run / LOCK)
    events = tail_events(run / "events.jsonl", _ALL_BYTES if owner or not outcome else _TAIL_BYTES)
    status, note = str((outcome or {}).get("status", "")), (outcome or {}).get("reason")
    if is_running:
        status, note = "running", str(owner)
    elif owner is not None:
        status, note = "killed", "its process ended without writing a result"
    elif not status:
        status = "killed" if plan else "unreadable"
        note = f"it has no `{OUTCOME}`" if plan else f"`{PLAN}` is missing or damaged"
    steps = [event for event in events if event.get("kind") == "step"]
    held_out = [_number(event.get("loss")) for event in events if event.get("kind") == "held_out"]
    known = [loss for loss in held_out if loss is not None and math.isfinite(loss)]
    if owner is not None or outcome is None:  # an outcome is then of an earlier start
        outcome = {}
    best = (outcome.get("held_out") or {}).get("best") if isinstance(outcome.get("held_out"), dict) else None
    plan = plan or {}
    return RunSummary(
        run=str(run),
        status=status,
        verdict=_verdict(run / REPORT),
        held_out=_number(best) if outcome else min(known, default=None),
        loss=_number(outcome.get("last_loss")) if outcome else _number(steps[-1].get("loss")) if steps else None,
        steps=_whole(outcome.get("steps")) if outcome else _whole(steps[-1].get("step")) if steps else None,
        planned_steps=_whole(_chosen(plan, "num_steps")),
        tokens_per_second=speed_of(steps),
        when=_modified(run),
        model=_text(plan.get("model")),
        method=_text(_chosen(plan, "method")),
        data=_data(plan),
        note=_text(note),
    )


def list_runs(
    folder: Path, *, filters: Sequence[str] = (), sort: str = "when", is_reversed: bool = False
) -> list[RunSummary]:
    """Return the runs in a folder. `filters` are `COLUMN=TEXT`, which a value must contain, in any case of letters.

    Sorted by a column: the newest, the lowest loss, the fastest first. Raises UserError for an unknown column.
    """
    if not folder.is_dir():
        raise UserError(f"there is no folder `{folder}`", fix="name a folder with runs, or a run")
    wanted = [_parse_filter(text) for text in filters]
    require_column(sort, "--sort")
    runs = [summarise(run) for run in find_runs(folder)]
    runs = [run for run in runs if all(_matches(run, *one) for one in wanted)]
    is_high_first = sort in ("when", "tokens_per_second", "steps")
    known = [run for run in runs if not _is_unknown(getattr(run, sort))]
    known.sort(key=_sort_key(sort), reverse=is_high_first != is_reversed)
    return known + sorted((run for run in runs if _is_unknown(getattr(run, sort))), key=_sort_key("run"))


def require_column(name: str, option: str) -> None:
    """Raise UserError if there is no such column."""
    if name not in COLUMNS:
        fix = did_you_mean(close_names(name, COLUMNS), ", ".join(COLUMNS))
        raise UserError(f"there is no column `{name}`", where=option, fix=fix)


def _parse_filter(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"`{text}` is not a filter", where="--filter", fix="write COLUMN=TEXT, like `status=finished`")
    require_column(name, "--filter")
    return name, value.casefold()


def _matches(run: RunSummary, name: str, value: str) -> bool:
    return value in str(getattr(run, name) or "").casefold()


def _is_unknown(value: object) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _sort_key(name: str) -> Callable[[RunSummary], Any]:
    return lambda run: getattr(run, name)


# Read the files of a run, whatever their state.


def read_object(path: Path) -> dict[str, Any] | None:
    """Return a JSON object, or None if the file is missing, damaged or something else."""
    try:
        value = orjson.loads(read_bytes(path))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def tail_events(path: Path, num_bytes: int = _TAIL_BYTES) -> list[dict[str, Any]]:
    """Return the intact events at the end of a log."""
    lines = _tail(path, num_bytes).split(b"\n")
    events = []
    for line in lines:
        try:
            event = orjson.loads(line)
        except ValueError:
            continue  # the first line may be cut, the last one incomplete
        if isinstance(event, dict):
            events.append(event)
    return events


def _tail(path: Path, num_bytes: int) -> bytes:
    try:
        with open_file(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - num_bytes))
            return file.read()
    except OSError:
        return b""


def _verdict(path: Path) -> str | None:
    # Reports have all answers and can be large. Keys are sorted, so the verdict is near the end.
    found = _VERDICT.findall(_tail(path, _TAIL_BYTES))
    if found:
        return found[-1].decode()
    verdict = (read_object(path) or {}).get("verdict")
    return verdict if isinstance(verdict, str) else None


def speed_of(steps: Sequence[dict[str, Any]]) -> float | None:
    """Return the tokens per second of the last steps. The first step of a run is left out: it is slower."""
    steps = steps[1:] if len(steps) > 1 and steps[0].get("step") == 1 else steps
    pairs = [(_number(step.get("tokens")), _number(step.get("seconds"))) for step in steps]
    tokens, seconds = (sum(part or 0.0 for part in parts) for parts in zip(*pairs, strict=True)) if pairs else (0, 0)
    return tokens / seconds if seconds else None


def _number(value: object) -> float | None:
    try:
        return as_number(value) if isinstance(value, int | float | str) else None
    except ValueError:
        return None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _chosen(plan: dict[str, Any], name: str) -> object:
    value = plan.get(name)
    return value.get("value") if isinstance(value, dict) else None


def _data(plan: dict[str, Any]) -> str | None:
    config = plan.get("config")
    data = config.get("data") if isinstance(config, dict) else None
    sources = data.get("sources") if isinstance(data, dict) else None
    names = [str(source.get("path")) for source in sources or [] if isinstance(source, dict) and source.get("path")]
    if not names:
        return _text(plan.get("corpus"))
    return ", ".join(PurePath(name).name for name in names[:3]) + (", ..." if len(names) > 3 else "")


def _modified(run: Path) -> float:
    times = []
    for name in (OUTCOME, REPORT, "events.jsonl", PLAN):
        try:
            times.append((run / name).stat().st_mtime)
        except OSError:
            continue
    return max(times, default=0.0)


def training_seconds(run: Path) -> float | None:
    """Return how long a run took, or None if that is not known."""
    outcome = read_object(run / OUTCOME) or {}
    measured: dict[str, Any] = outcome.get("measured") or {}
    return measured.get("seconds") or outcome.get("seconds")
