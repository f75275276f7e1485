"""`tunewell push`: upload an export or a report."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tunewell.cli.options import Argument, AsJson, ConfigFile, Option, Sets
from tunewell.cli.progress import shown_progress
from tunewell.cli.render import emit, ending, hanging, json_text, table, width
from tunewell.core.units import count, size_bytes

if TYPE_CHECKING:
    from tunewell.features.remote.push_workflow import PushResult

_SIZE_COLUMNS = 13
"""Columns of `117.7 MiB` and the gap before it."""


def command(
    place: Annotated[str, Argument("A run, or a folder that `export` wrote.", "RUN_OR_EXPORT")],
    to: Annotated[str, Option("`s3://BUCKET/PREFIX`, `r2://...` or `hf://USER/NAME`.", "ADDRESS")],
    public: Annotated[bool, Option("Create the repository on the hub as a public one.")] = False,
    dry_run: Annotated[bool, Option("Upload nothing: write the folder that would be uploaded.")] = False,
    out: Annotated[Path | None, Option("Folder of `--dry-run`.", "FOLDER")] = None,
    config: ConfigFile = None,
    set_: Sets = None,
    json: AsJson = False,
) -> None:
    """Upload a verified export, or the report of a run, to object storage or the hub.

    A reader sees the old or the new version, never a part. Run the command again after an interruption: it continues.
    """
    from tunewell.config.load import load_config
    from tunewell.features.remote.push_workflow import push

    storage = load_config(config, set_ or ()).config.storage
    with shown_progress() as progress:
        result = push(place, to, storage=storage, is_public=public, is_dry_run=dry_run, out=out, progress=progress)
    emit(json_text(result.as_json()) if json else _screen(result))


def _screen(result: "PushResult") -> str:
    files = sorted(result.files.items(), key=lambda item: -item[1])
    rows = [(ending(name, width() - _SIZE_COLUMNS), size_bytes(size)) for name, size in files]
    lines = [table(rows, right=(1,))]
    lines += [hanging("note: ", note) for note in result.notes]
    number = count(len(result.files), "file")
    if result.pushed is None:
        lines.append(
            hanging(
                "wrote ", f"`{result.folder}`: {number} that would be pushed to `{result.to}`; nothing was uploaded"
            )
        )
        return "\n".join(lines)
    kept = f", {result.pushed.num_kept} were there already" if result.pushed.num_kept else ""
    uploaded = f"{size_bytes(result.pushed.num_bytes)} uploaded{kept}"
    lines.append(hanging("pushed ", f"{number} to `{result.pushed.address}` ({uploaded})"))
    if not result.to.startswith("hf://") and "proof.json" in result.files:
        lines.append(hanging("next: ", f"`tunewell verify {result.to}` downloads and verifies it"))
    return "\n".join(lines)
