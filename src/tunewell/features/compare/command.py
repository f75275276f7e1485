"""`tunewell compare`: runs, models and indexes side by side."""

from pathlib import Path
from typing import Annotated

import typer

from tunewell.cli.options import AsJson, Device
from tunewell.cli.progress import shown_stages
from tunewell.cli.render import emit, json_text


def command(
    columns: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help="Runs, adapters, model folders, `.gguf` files, hub ids or `URL#MODEL`. Default: this folder's run.",
        ),
    ] = None,
    index: Annotated[
        list[str] | None,
        typer.Option("--index", metavar="INDEX", help="Also answer from this index. Can be repeated."),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", metavar="PATH", help="Questions with answers. Default: the run's held-out rows."),
    ] = None,
    questions: Annotated[int, typer.Option(min=1, metavar="N", help="Maximum number of questions.")] = 100,
    passages: Annotated[
        int | None,
        typer.Option(min=1, max=50, metavar="N", help="Number of passages to read. Default: set by the index."),
    ] = None,
    judge: Annotated[
        str | None, typer.Option(metavar="URL#MODEL", help="Judge answers by a model instead of by keys.")
    ] = None,
    labels: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Answers judged by a person, to measure `--judge` by.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder to write the HTML page to.")] = Path("comparison"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Validate every run again. Only for runs alone.")] = False,
    device: Device = "auto",
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
        found = compare(
            columns or (),
            indexes=index or (),
            data=data,
            out=out,
            is_fresh=fresh,
            num_questions=questions,
            num_passages=passages,
            device=device,
            judge=judge,
            labels=labels,
            progress=progress,
        )
    emit(json_text({**found.comparison.as_json(), "page": str(found.page)}) if json else compare_screen(found))
