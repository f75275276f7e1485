"""`tunewell verify`."""

from pathlib import Path
from typing import Annotated

import typer

from tunewell.cli.options import AsJson


def command(
    folder: Annotated[Path, typer.Argument(metavar="EXPORT", help="A folder that `tunewell export` made.")],
    base: Annotated[
        str | None, typer.Option(help="Where the base of an adapter lies now, if not where it lay then.")
    ] = None,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read a base from a `.bin` file; only from people you trust.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Prove an export again from its files: ids, logits, answers, stops. Exit code 4 if a link of the chain broke."""
    from tunewell.cli.progress import shown_stages
    from tunewell.cli.render import emit, emit_json, hanging
    from tunewell.cli.screens.export import parity_screen
    from tunewell.core.progress import Progress

    with shown_stages() as progress:
        progress(Progress("starting torch"))
        from tunewell.workflows.verify import EXIT_NOT_PROVEN, verify

        notes: list[str] = []
        parity = verify(folder, base=base, allow_pickle=allow_pickle, progress=progress, notes=notes)
    if json:
        emit_json(parity.model_dump(mode="json") | {"notes": notes})
    else:
        emit("\n".join([parity_screen(parity), *(hanging("note: ", note) for note in notes)]))
    if not parity.is_ok:
        raise typer.Exit(EXIT_NOT_PROVEN)
