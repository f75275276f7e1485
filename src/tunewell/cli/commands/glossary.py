"""`tunewell glossary`: look up a term or a drop reason."""

from typing import Annotated

import typer

from tunewell.cli.options import AsJson


def command(
    word: Annotated[
        list[str] | None,
        typer.Argument(metavar="TERM", help="A term, or the id of a drop reason. Default: list all terms."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Look up a term, or the reason why a row was dropped."""
    from tunewell.cli.render import emit, emit_json, folded_table
    from tunewell.config.glossary import entries, find_entry

    found = dict([find_entry(" ".join(word))]) if word else entries()
    if json:
        emit_json(found)
    else:
        emit(folded_table(list(found.items())))
