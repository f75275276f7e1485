"""`tunewell runs`: list the runs in a folder, or show the state of one run."""

from pathlib import Path
from shlex import quote
from typing import Annotated

from tunewell.cli.options import Argument, AsJson, Option
from tunewell.cli.render import emit, json_text
from tunewell.core.errors import UserError


def command(
    folder: Annotated[str, Argument("A folder with runs, or one run.", "FOLDER | RUN")] = ".",
    filter_: Annotated[
        list[str] | None, Option("Only runs whose column contains the text. Can be repeated.", "COLUMN=TEXT")
    ] = None,
    sort: Annotated[str, Option("Sort by a column: `when`, `held_out`, `tokens_per_second`, ...", "COLUMN")] = "when",
    reverse: Annotated[bool, Option("Reverse the order.")] = False,
    columns: Annotated[str | None, Option("Columns, separated by commas.", "NAMES")] = None,
    stacks: Annotated[bool, Option("Print the stack of each thread of a run in progress.")] = False,
    stop: Annotated[bool, Option("Stop a run: it saves a checkpoint first.")] = False,
    json: AsJson = False,
) -> None:
    """List the runs in a folder, or show whether one run is alive."""
    from tunewell.cli.screens.runs import runs_screen, status_screen
    from tunewell.runs.state import COLUMNS, list_runs, require_column
    from tunewell.runs.status import find_status, stop_run

    names = [name.strip() for name in columns.split(",") if name.strip()] if columns else []
    for name in names:
        require_column(name, "--columns")
    path = Path(folder).expanduser()
    if stop:
        if stacks or find_status(path, is_quick=True) is None:
            what = "`--stop` and `--stacks` exclude each other" if stacks else f"`{folder}` is not a run"
            raise UserError(what, fix="name a run folder; `tunewell runs` lists runs")
        message = stop_run(path)
        resume = f"`tunewell train --resume --out {quote(folder)}` resumes it"
        emit(json_text({"message": message}) if json else f"{message}\nnext: {resume}")
        return
    status = find_status(path, with_stacks=stacks)
    if status is not None:
        emit(json_text(status.as_json()) if json else status_screen(status))
        return
    found = list_runs(path, filters=filter_ or (), sort=sort, is_reversed=reverse)
    if json:
        kept = names or COLUMNS
        rows = [run.as_json() for run in found]
        emit(json_text([{name: row[name] for name in kept} for row in rows]))
    else:
        emit(runs_screen(found, folder=folder, columns=names, is_filtered=bool(filter_)))
