"""List the runs in a folder: status, losses, verdict and speed of each, read from its files without torch.

A damaged or unfinished run is listed with what can be read; it never raises.
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path, PurePath
from typing import Any

from tunewell.core.errors import UserError, close_names, did_you_mean
from tunewell.records.events import plain
from tunewell.records.plan import PLAN
from tunewell.records.rundir import LOCK, OUTCOME
from tunewell.runs.state import EVENTS, StoredRun, value_in

_MAX_DEPTH = 4
_SKIPPED = frozenset({"checkpoints", "node_modules", "__pycache__", "export", "site-packages"})
_HIGH_FIRST = frozenset({"when", "tokens_per_second", "steps"})


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
        return plain(asdict(self)) | {"when": datetime.fromtimestamp(self.when).astimezone().isoformat("T", "seconds")}


COLUMNS = tuple(RunSummary.__dataclass_fields__)


def find_runs(folder: Path) -> Iterator[Path]:
    """Yield the run folders in a folder, down to four levels. A folder that cannot be read is skipped."""
    for here, folders, files in os.walk(folder):
        names, path = {*folders, *files}, Path(here)
        if PLAN in names or (EVENTS in names and LOCK in names):
            yield path
            folders.clear()
        elif len(path.relative_to(folder).parts) >= _MAX_DEPTH:
            folders.clear()
        else:
            folders[:] = [name for name in folders if name not in _SKIPPED and not name.startswith(".")]


def summarise(folder: Path) -> RunSummary:
    """Read one run. A file that is missing or damaged leaves its values unknown."""
    return summary_of(StoredRun(folder))


def summary_of(run: StoredRun) -> RunSummary:
    """Return the values of a run for a list."""
    outcome = {} if run.owner is not None else run.outcome  # that of an earlier start
    steps = run.steps
    if outcome:
        held_out = value_in(outcome, "held_out", "best")
        loss, num_steps = value_in(outcome, "last_loss"), value_in(outcome, "steps", kind=int)
    else:
        losses = [value_in(event, "loss") for event in run.events if event.get("kind") == "held_out"]
        held_out = min((loss for loss in losses if loss is not None and math.isfinite(loss)), default=None)
        last = steps[-1] if steps else {}
        loss, num_steps = value_in(last, "loss"), value_in(last, "step", kind=int)
    return RunSummary(
        run=str(run.folder),
        status=run.status,
        verdict=run.verdict,
        held_out=held_out,
        loss=loss,
        steps=num_steps,
        planned_steps=value_in(run.plan, "num_steps", "value", kind=int),
        tokens_per_second=speed_of(steps),
        when=run.changed_at,
        model=value_in(run.plan, "model", kind=str),
        method=value_in(run.plan, "method", "value", kind=str),
        data=_data(run.plan),
        note=_note(run),
    )


def _note(run: StoredRun) -> str | None:
    if run.is_running:
        return str(run.owner)
    if run.owner is not None:
        return "its process ended without writing a result"
    if run.outcome.get("status"):
        return value_in(run.outcome, "reason", kind=str)
    return f"it has no `{OUTCOME}`" if run.plan else f"`{PLAN}` is missing or damaged"


def speed_of(steps: Sequence[dict[str, Any]]) -> float | None:
    """Return the tokens per second of the last steps. The first step of a run is left out: it is slower."""
    steps = steps[1:] if len(steps) > 1 and steps[0].get("step") == 1 else steps
    tokens, seconds = (sum(value_in(step, name) or 0.0 for step in steps) for name in ("tokens", "seconds"))
    return tokens / seconds if seconds else None


def _data(plan: dict[str, Any]) -> str | None:
    sources = value_in(plan, "config", "data", "sources", kind=list) or []
    names = [PurePath(path).name for source in sources if (path := value_in(source, "path", kind=str))]
    if not names:
        return value_in(plan, "corpus", kind=str)
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def list_runs(
    folder: Path, *, filters: Sequence[str] = (), sort: str = "when", is_reversed: bool = False
) -> list[RunSummary]:
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
    runs = [summarise(run) for run in find_runs(folder)]
    runs = [run for run in runs if all(value in str(getattr(run, name) or "").casefold() for name, value in wanted)]
    known = [run for run in runs if (value := getattr(run, sort)) is not None and value == value]  # NaN is unknown
    known.sort(key=lambda run: getattr(run, sort), reverse=(sort in _HIGH_FIRST) != is_reversed)
    return known + sorted((run for run in runs if run not in known), key=lambda run: run.run)


def require_column(name: str, option: str) -> None:
    """Raise UserError if there is no such column."""
    if name not in COLUMNS:
        fix = did_you_mean(close_names(name, COLUMNS), ", ".join(COLUMNS))
        raise UserError(f"there is no column `{name}`", where=option, fix=fix)
