"""`tunewell glossary`: look up a term or a drop reason."""

from typing import Annotated

from tunewell.cli.options import Argument, AsJson
from tunewell.cli.render import emit, folded_table, json_text
from tunewell.config.glossary import entries, find_entry


def command(
    word: Annotated[
        list[str] | None, Argument("A term, or the id of a drop reason. Default: list all terms.", "TERM")
    ] = None,
    json: AsJson = False,
) -> None:
    """Look up a term, or the reason why a row was dropped."""
    found = dict([find_entry(" ".join(word))]) if word else entries()
    emit(json_text(found) if json else folded_table(list(found.items())))
