"""`tunewell compare`: runs, models and indexes side by side."""

from pathlib import Path
from typing import Annotated

from tunewell.cli.options import Argument, AsJson, Device, Option
from tunewell.cli.progress import shown_stages
from tunewell.cli.render import emit, json_text


def command(
    columns: Annotated[
        list[str] | None,
        Argument(
            "Runs, adapters, model folders, `.gguf` files, hub ids or `URL#MODEL`. Default: this folder's run.", "MODEL"
        ),
    ] = None,
    index: Annotated[list[str] | None, Option("Also answer from this index. Can be repeated.", "INDEX")] = None,
    data: Annotated[
        list[str] | None, Option("Questions with answers. Default: the run's held-out rows.", "PATH")
    ] = None,
    questions: Annotated[int, Option("Maximum number of questions.", "N", min=1)] = 100,
    passages: Annotated[
        int | None, Option("Number of passages to read. Default: set by the index.", "N", min=1, max=50)
    ] = None,
    judge: Annotated[str | None, Option("Judge answers by a model instead of by keys.", "URL#MODEL")] = None,
    labels: Annotated[Path | None, Option("Answers judged by a person, to measure `--judge` by.", "FILE")] = None,
    out: Annotated[Path, Option("Folder to write the HTML page to.", "FOLDER")] = Path("comparison"),
    fresh: Annotated[bool, Option("Validate every run again. Only for runs alone.")] = False,
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
