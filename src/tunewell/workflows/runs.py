"""`tunewell runs`: list the runs in a folder, or show the state of one run."""

from collections.abc import Sequence
from pathlib import Path

from tunewell.core.errors import UserError
from tunewell.records.plan import PLAN
from tunewell.runs.listing import RunSummary, list_runs
from tunewell.runs.status import RunStatus, run_status


def runs(
    folder: str | Path = ".", *, filters: Sequence[str] = (), sort: str = "when", is_reversed: bool = False
) -> list[RunSummary]:
    """Return the runs in a folder and its subfolders, the newest first."""
    return list_runs(Path(folder).expanduser(), filters=filters, sort=sort, is_reversed=is_reversed)


def find_status(path: str | Path, *, with_stacks: bool = False) -> RunStatus | None:
    """Return the status of a run, or None if the path is a folder without a run of its own."""
    run = Path(path).expanduser()
    if not (run / PLAN).exists() and not (run / "events.jsonl").exists():
        if with_stacks:
            raise UserError(f"`{run}` is not a run", fix="name a run folder; `tunewell runs` lists runs")
        return None
    return run_status(run, with_stacks=with_stacks)
