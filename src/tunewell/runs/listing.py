"""List the runs in a folder, filtered and sorted, without torch.

A damaged or unfinished run is listed with what can be read; it never raises.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from tunewell.core.errors import UserError, close_names, did_you_mean
from tunewell.records.plan import PLAN
from tunewell.records.rundir import LOCK
from tunewell.runs.state import COLUMNS, EVENTS, StoredRun

_MAX_DEPTH = 4
_SKIPPED = frozenset({"checkpoints", "node_modules", "__pycache__", "export", "site-packages"})
_HIGH_FIRST = frozenset({"when", "tokens_per_second", "steps"})


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
    known = [run for run in runs if (value := getattr(run, sort)) is not None and value == value]  # NaN is unknown
    known.sort(key=lambda run: getattr(run, sort), reverse=(sort in _HIGH_FIRST) != is_reversed)
    return known + sorted((run for run in runs if run not in known), key=lambda run: run.run)


def require_column(name: str, option: str) -> None:
    """Raise UserError if there is no such column."""
    if name not in COLUMNS:
        fix = did_you_mean(close_names(name, COLUMNS), ", ".join(COLUMNS))
        raise UserError(f"there is no column `{name}`", where=option, fix=fix)
