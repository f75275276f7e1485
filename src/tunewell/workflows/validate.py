"""`tunewell validate`: evaluate a run, an adapter or a model, and write its report."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.files import make_private, write_atomic
from tunewell.core.optional import import_optional
from tunewell.core.progress import ProgressListener, silent, with_stage
from tunewell.data.sources.base import is_url, split_limit
from tunewell.evaluation.metrics import load_metrics
from tunewell.evaluation.report.markdown import report_markdown
from tunewell.evaluation.report.page import report_page
from tunewell.evaluation.rows import EvaluationSet, held_out_rows, rows_of_corpus, rows_of_file
from tunewell.evaluation.session import EvaluationSession, ValidateOptions
from tunewell.inference.model_ref import ModelRef
from tunewell.records.events import plain
from tunewell.records.report import MARKDOWN, PAGE, Report, Validation, write_report
from tunewell.runs.resolve import resolve_model
from tunewell.workflows.prepare import temporary_corpus


def validate(
    model: str | PathLike[str] | ModelRef | None = None,
    *,
    options: ValidateOptions | None = None,
    progress: ProgressListener = silent,
    **fields: Any,
) -> Validation:
    """Evaluate a run (default: the run of the current folder), an adapter or a model, and write the report.

    `fields` are fields of ValidateOptions: `validate("run", data="more.jsonl", metrics={"exact": exact})`. A metric is
    `fn(question, answer, reference) -> number`. Raises UserError if there is no model or there are no rows to test on.
    """
    options = replace(options or ValidateOptions(), **fields)
    ref = resolve_model(
        model, checkpoint=options.checkpoint, base=options.base, template=options.template, sets=options.sets
    )
    folder = Path(options.out or _report_folder(ref, options))
    _require_writable(folder)
    if options.lm_eval:
        import_optional("lm_eval", extra="lm-eval", purpose="`validate --lm-eval`")
    metrics = {**load_metrics(ref.loaded.config.verdict.metrics, base=ref.loaded.base), **options.metrics}
    for name, metric in metrics.items():
        if not callable(metric):
            raise UserError(
                f"the metric `{name}` is not a function but {type(metric).__name__}",
                fix="give a function of a question, an answer and a reference that returns a number",
            )
    with evaluation_set(ref, options, progress) as rows:
        report = EvaluationSession(ref, options, rows, metrics=metrics, progress=progress).evaluate()
    # Rows and answers may also contain secrets, and reports are shared.
    report = Report.model_validate(plain(report.model_dump(mode="python")))
    make_private(folder)
    write_report(folder, report)
    write_atomic(folder / PAGE, report_page(report))
    write_atomic(folder / MARKDOWN, report_markdown(report))
    return Validation(report, folder)


def _report_folder(ref: ModelRef, options: ValidateOptions) -> Path:
    """Return the folder of the report: that of a run only for its own held-out rows and its chosen checkpoint."""
    if ref.kind != "run" or ref.path is None:
        return Path("report")
    is_own = options.data is None and options.corpus is None
    return ref.path if is_own else ref.path / "other-rows"


def _require_writable(folder: Path) -> None:
    """Raise UserError if the report cannot be written, before the evaluation takes minutes."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(
            f"the report cannot be written to `{folder}`",
            where=f"`{existing}` is {'not writable' if existing.is_dir() else 'not a folder'}",
            fix="choose another folder with `--out`",
        )


@contextmanager
def evaluation_set(
    ref: ModelRef, options: ValidateOptions, progress: ProgressListener = silent
) -> Iterator[EvaluationSet]:
    """Yield the rows to test on: held-out rows, or rows of a file (`FILE` or `FILE#LIMIT`) in a temporary corpus."""
    if options.data is None:
        yield rows_of_corpus(options.corpus) if options.corpus is not None else held_out_rows(ref)
        return
    given, settings = options.data, ref.loaded.config.data
    paths = [str(given)] if isinstance(given, str | Path) else [str(path) for path in given]
    data = ", ".join(paths)
    # Read the files like the rows of the run, with the same columns and system prompt.
    like = settings.sources[0].model_dump(exclude_unset=True, exclude={"share"}) if settings.sources else {}
    sources = []
    for path, limit in map(split_limit, paths):
        sources.append(like | {"path": path if is_url(path) else str(Path(path).absolute()), "limit": limit})
    changes = {"data": settings.model_dump() | {"sources": sources, "held_out": 0.0, "selection": 0, "index": None}}
    with ExitStack() as stack:
        try:
            listen = with_stage(progress, f"reading {data}")
            corpus = stack.enter_context(temporary_corpus(ref.loaded, changes, listen))
        except UserError as error:
            raise UserError(f"`{data}` cannot be used: {error.what}", where=error.where, fix=error.fix) from error
        yield rows_of_file(corpus, data, model=ref)
