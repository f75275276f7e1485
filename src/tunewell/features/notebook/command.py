"""`tunewell notebook`: write a Colab notebook for a config."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tunewell.cli.options import AsJson, ConfigFile, Option
from tunewell.cli.render import emit, folded_table, hanging, json_text
from tunewell.core.units import count

if TYPE_CHECKING:
    from tunewell.features.notebook.workflow import NotebookResult


def command(
    config: ConfigFile = None,
    out: Annotated[Path | None, Option("Notebook to write. Default: `train.ipynb`.", "FILE")] = None,
    data: Annotated[str, Option("How your files get to Colab: `upload`, `drive` or a URL.", "HOW")] = "upload",
    package: Annotated[
        str | None, Option("What pip installs: a requirement, a wheel, a git URL or `none`.", "SPEC")
    ] = None,
    force: Annotated[bool, Option("Overwrite an existing notebook.")] = False,
    json: AsJson = False,
) -> None:
    """Write a Colab notebook that trains this config on a GPU."""
    from tunewell.features.notebook.workflow import notebook

    result = notebook(config, out=out, data=data, package=package, is_overwriting=force)
    emit(json_text(result.as_json()) if json else screen(result))


def screen(result: "NotebookResult") -> str:
    """Return the screen: the written notebook, the files that it needs, and how to open it."""
    sources = {"upload": "upload them when Colab asks", "drive": "from the folder `tunewell` of your Google Drive"}
    names = ", ".join(f"`{name}`" for name in result.files[:4])
    more = f" and {count(len(result.files) - 4)} more" if len(result.files) > 4 else ""
    rows = [
        ["config", f"`{result.config}`, copied into the notebook"],
        ["files", f"{names}{more}: {sources.get(result.data, f'from {result.data}')}"],
        *(["installs", f"`{one}`"] for one in result.installs),
    ]
    parts = [folded_table(rows), *(hanging("note: ", note) for note in result.notes)]
    parts.append(f"wrote `{result.path}`, {count(result.num_cells)} cells")
    upload = "open it in Colab (colab.research.google.com, File > Upload notebook), then Runtime > Run all"
    return "\n".join([*parts, hanging("next: ", upload)])
