"""`tunewell validate`: test a trained model on held-out rows, and print the verdict."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunewell.cli.options import AllowPickle, AsJson, Option, RunArgument, Sets
from tunewell.cli.progress import shown_stages
from tunewell.cli.render import emit, hanging, json_text
from tunewell.cli.screens.verdict import lined, verdict_screen
from tunewell.core.progress import Progress

if TYPE_CHECKING:
    from tunewell.records.report import Validation


def command(
    model: RunArgument = None,
    data: Annotated[str | None, Option("Rows to test on instead of the run's held-out rows.")] = None,
    checkpoint: Annotated[str, Option("`best` on the selection slice, `last`, or a step.")] = "best",
    base: Annotated[str | None, Option("Base model, if the run or adapter does not name it.")] = None,
    template: Annotated[str | None, Option("Chat template, if the model has none.")] = None,
    device: Annotated[str, Option("Device: `cpu`, `cuda` or `mps`.")] = "auto",
    out: Annotated[Path | None, Option("Folder for the report. Default: the run's folder.")] = None,
    lm_eval: Annotated[str | None, Option("Additional lm-eval tasks, separated by commas.", "TASKS")] = None,
    set_: Sets = None,
    *,
    allow_pickle: AllowPickle,
    json: AsJson = False,
) -> None:
    """Test a trained model on held-out rows: PASS, WEAK, FAIL or UNPROVEN.

    Exit codes: 0 PASS, 3 WEAK or UNPROVEN (not shown to be better), 4 FAIL.
    """
    from tunewell.data.sources.base import SourceOptions, is_url, split_limit
    from tunewell.data.sources.local import LocalFile
    from tunewell.evaluation.rows import require_rows
    from tunewell.runs.resolve import resolve_model

    # Whatever is wrong with the run or the rows is reported before torch is imported.
    ref = resolve_model(model, checkpoint=checkpoint, base=base, template=template, sets=set_ or ())
    if data is not None:
        path, _ = split_limit(data)
        if not is_url(path):
            LocalFile.find(path, base=Path(), options=SourceOptions())
    else:
        require_rows(ref)
    with shown_stages() as progress:
        progress(Progress("importing torch"))
        from tunewell.cli.startup import import_libraries, keep_memory_on_cpu

        import_libraries(device=device, model=ref.model)
        keep_memory_on_cpu(device)
        from tunewell.evaluation.session import ValidateOptions
        from tunewell.workflows.validate import validate

        options = ValidateOptions(
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
        result = validate(ref, options=options, progress=progress)
    emit(json_text(as_json(result)) if json else f"{verdict_screen(result.report)}\n{closing(result)}")
    if result.exit_code:
        raise typer.Exit(result.exit_code)


def closing(result: "Validation") -> str:
    """Return the last lines of the screen: the written files and the next step."""
    rows = [
        ["wrote", f"`{result.page}`", "the report on one page, to read or to send"],
        ["wrote", f"`{result.folder / 'report.json'}`", "the same for programs; `report.md` for pull requests"],
    ]
    return f"{lined(rows)}\n{hanging('next: ', result.report.next)}"


def as_json(result: "Validation") -> dict[str, object]:
    """Return the object that `validate --json` prints: the report and the path of its page."""
    from tunewell.records.events import plain

    return plain(result.report.model_dump(mode="python")) | {"page": str(result.page), "exit_code": result.exit_code}
