"""`tunewell compare`: several runs side by side."""

from pathlib import Path
from typing import Annotated

import typer

from tunewell.cli.options import AsJson
from tunewell.cli.progress import shown_stages
from tunewell.cli.render import emit, json_text


def command(
    runs: Annotated[list[str], typer.Argument(metavar="RUN", help="Two or more runs.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder to write the HTML page to.")] = Path("comparison"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Validate every run again.")] = False,
    json: AsJson = False,
) -> None:
    """Compare runs: settings that differ, curves, answers, speed.

    An existing report is used if it has the same held-out rows; other runs are validated first.
    """
    from tunewell.cli.screens.compare import compare_screen
    from tunewell.workflows.compare import compare_runs

    with shown_stages() as progress:
        found = compare_runs(runs, out=out, is_fresh=fresh, progress=progress)
    emit(json_text({**found.comparison.as_json(), "page": str(found.page)}) if json else compare_screen(found))
