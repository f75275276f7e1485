"""`tunewell compare`: runs, models and indexes side by side."""

from typing import Annotated

from tunewell.cli.options import Argument, AsJson
from tunewell.cli.progress import shown_stages
from tunewell.cli.render import emit, json_text
from tunewell.features.compare.options import CompareOptions


def command(
    columns: Annotated[
        list[str] | None,
        Argument(
            "Runs, adapters, model folders, `.gguf` files, hub ids or `URL#MODEL`. Default: this folder's run.", "MODEL"
        ),
    ] = None,
    *,
    options: CompareOptions,
    json: AsJson = False,
) -> None:
    """Compare runs and models, with and without documents.

    With an index, the base model and the tuned model answer the same held-out questions, with and without passages, and
    one of them is recommended. Runs alone are compared by settings, curves, answers and speed; an existing report is
    used if it has the same held-out rows.
    """
    from tunewell.features.compare.screen import compare_screen
    from tunewell.features.compare.workflow import compare

    with shown_stages() as progress:
        found = compare(columns or (), options=options, progress=progress)
    emit(json_text({**found.comparison.as_json(), "page": str(found.page)}) if json else compare_screen(found))
