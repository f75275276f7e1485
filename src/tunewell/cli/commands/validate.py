"""`tunewell validate`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunewell.cli.options import AsJson, Sets

if TYPE_CHECKING:
    from tunewell.records.report import Validation


def command(
    place: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="A run, an adapter or a model; by default the run of the config here."),
    ] = None,
    data: Annotated[str | None, typer.Option(help="Rows to judge on, in place of the run's held-out rows.")] = None,
    against: Annotated[str | None, typer.Option(metavar="RUN", help="Another run to compare with.")] = None,
    checkpoint: Annotated[str, typer.Option(help="`best` by held-out loss, `last`, or a step.")] = "best",
    base: Annotated[str | None, typer.Option(help="What it was made from, where that is not written there.")] = None,
    template: Annotated[str | None, typer.Option(help="Chat template of a model that brings none.")] = None,
    device: Annotated[str, typer.Option(help="Where to compute: `cpu`, `cuda`, `mps`.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Folder for the report; by default the run's.")] = None,
    lm_eval: Annotated[
        str | None, typer.Option("--lm-eval", metavar="TASKS", help="Tasks of lm-eval to run as well, by commas.")
    ] = None,
    set_: Sets = None,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read weights from a `.pt` file; only from people you trust.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Judge a trained model: PASS, WEAK or FAIL, with the evidence. Exit codes 0, 3 and 4."""
    from tunewell.cli.progress import shown_stages
    from tunewell.cli.render import emit, emit_json
    from tunewell.cli.screens.verdict import comparison_screen, verdict_lines, verdict_screen
    from tunewell.core.progress import Progress

    with shown_stages() as progress:
        progress(Progress("starting torch"))
        from tunewell.workflows.validate import ValidateOptions, validate
        from tunewell.workflows.validate_against import validate_against

        order = ValidateOptions(
            data=data,
            checkpoint=checkpoint,
            base=base,
            template=template,
            device=device,
            out=out,
            sets=set_ or (),
            allow_pickle=allow_pickle,
            lm_eval=[task.strip() for task in lm_eval.split(",")] if lm_eval else (),
        )
        both = None if against is None else validate_against(place, against, order=order, progress=progress)
        found = validate(place, order=order, progress=progress) if both is None else both.this
    if json:
        told = as_json(found)
        emit_json(told if both is None else {**told, "against": both.comparison.as_json()})
    elif both is None:
        emit(f"{verdict_screen(found.report)}\n{closing(found)}")
    else:
        emit(f"{comparison_screen(both.comparison, both.notes)}\n\n{verdict_lines(found.report)}\n{closing(found)}")
    if found.exit_code:
        raise typer.Exit(found.exit_code)


def closing(found: "Validation") -> str:
    """Say what was made and what to do next."""
    from tunewell.cli.render import hanging
    from tunewell.cli.screens.verdict import lined

    rows = [["wrote", f"`{found.page}`", "the whole story on one page, to read or to send"]]
    told = "the same for a program; `report.md` for a pull request"
    rows.append(["wrote", f"`{found.folder / 'report.json'}`", told])
    return f"{lined(rows)}\n{hanging('next: ', found.report.next)}"


def as_json(found: "Validation") -> dict[str, object]:
    """Give the object that `validate --json` prints: the report, and where its pages lie."""
    from tunewell.records.events import plain

    return plain(found.report.model_dump(mode="python")) | {"page": str(found.page), "exit_code": found.exit_code}
