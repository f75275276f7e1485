"""`tunewell glossary [WORD]`."""

from typing import Annotated

import typer

from tunewell.cli.options import AsJson


def command(
    word: Annotated[
        list[str] | None, typer.Argument(help="The word, or the id of a drop reason; all of them if not given.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Say what a word or the reason for a dropped row means."""
    from tunewell.cli.render import emit, emit_json, folded_table
    from tunewell.config.glossary import look_up, words

    found = dict([look_up(" ".join(word))]) if word else words()
    if json:
        emit_json(found)
    else:
        emit(folded_table(list(found.items())))
