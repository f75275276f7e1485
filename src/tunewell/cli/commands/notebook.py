"""`tunewell notebook`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunewell.cli.options import AsJson, ConfigFile

if TYPE_CHECKING:
    from tunewell.workflows.notebook import NotebookResult


def command(
    config: ConfigFile = None,
    out: Annotated[Path | None, typer.Option(help="Where to write it; `train.ipynb` if not given.")] = None,
    data: Annotated[
        str, typer.Option(metavar="WAY", help="How your files get there: `upload`, `drive`, or an address.")
    ] = "upload",
    package: Annotated[
        str | None,
        typer.Option(metavar="SPEC", help="What pip installs: a requirement, a wheel, a git address, or `none`."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a notebook that is there.")] = False,
    json: AsJson = False,
) -> None:
    """Write a Colab notebook that does the run of a config on a GPU, and brings home the export."""
    from tunewell.cli.render import emit, emit_json
    from tunewell.workflows.notebook import notebook

    result = notebook(config, out=out, data=data, package=package, is_overwriting=force)
    if json:
        emit_json(result.as_json())
    else:
        emit(screen(result))


def screen(result: "NotebookResult") -> str:
    """Say what was written, what to bring to it, and where to open it."""
    from tunewell.cli.render import hanging, table
    from tunewell.core.units import count

    ways = {"upload": "Colab asks for them", "drive": "from the folder `tunewell` of your Google Drive"}
    named = ", ".join(f"`{name}`" for name in result.files[:4])
    more = f" and {count(len(result.files) - 4)} more" if len(result.files) > 4 else ""
    rows = [
        ["config", f"`{result.config}`, written into the notebook"],
        ["files", f"{named}{more}: {ways.get(result.data, f'from {result.data}')}"],
        *(["installs", f"`{one}`"] for one in result.installs),
    ]
    parts = [table(rows), *(hanging("note: ", note) for note in result.notes)]
    parts.append(f"wrote `{result.path}`, {count(result.num_cells)} cells")
    parts.append("next: open it in Colab (colab.research.google.com, File > Upload notebook), then Runtime > Run all")
    return "\n".join(parts)
