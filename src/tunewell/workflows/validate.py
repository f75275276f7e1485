"""`tunewell validate`: evaluate a run, an adapter or a model, and write its report."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunewell.config.load import LoadedConfig
from tunewell.config.schema import Config
from tunewell.core.errors import UserError
from tunewell.core.files import write_atomic
from tunewell.core.optional import import_optional
from tunewell.core.progress import ProgressListener, silent
from tunewell.data.corpus.reader import Corpus, open_corpus
from tunewell.evaluation.metrics import load_metrics
from tunewell.evaluation.report.markdown import report_markdown
from tunewell.evaluation.report.page import report_page
from tunewell.evaluation.session import (
    EvaluationSession,
    EvaluationSet,
    ValidateOptions,
    held_out_rows,
    rows_of_corpus,
    rows_of_file,
)
from tunewell.inference.chat_model import ModelRef
from tunewell.records.events import plain
from tunewell.records.report import MARKDOWN, PAGE, Report, Validation, write_report
from tunewell.runs.resolve import resolve_model
from tunewell.workflows.prepare import prepare


def validate(
    model: str | Path | None = None,
    *,
    options: ValidateOptions | None = None,
    progress: ProgressListener = silent,
    **fields: Any,
) -> Validation:
    """Evaluate a run (by default the one of the config here), an adapter or a model, and write the report.

    `fields` are fields of ValidateOptions: `validate("run", data="more.jsonl", metrics={"exact": exact})`. A metric is
    `fn(question, answer, reference) -> number`. Raises UserError if there is no model, or no rows to test it on.
    """
    options = replace(options or ValidateOptions(), **fields)
    ref = resolve_model(
        model, checkpoint=options.checkpoint, base=options.base, template=options.template, sets=options.sets
    )
    folder = options.out or (ref.path if ref.kind == "run" and ref.path else Path("report"))
    _require_writable(folder)
    if options.lm_eval:
        import_optional("lm_eval", extra="lm-eval", purpose="`validate --lm-eval`")
    metrics = {**load_metrics(ref.loaded.config.verdict.metrics, base=ref.loaded.base), **options.metrics}
    with _evaluation_set(ref, options) as rows:
        report = EvaluationSession(ref, options, rows, metrics=metrics, progress=progress).evaluate()
    # Rows and answers may hold secrets too, and reports are sent to others.
    report = Report.model_validate(plain(report.model_dump(mode="python")))
    folder.mkdir(parents=True, exist_ok=True)
    write_report(folder, report)
    write_atomic(folder / PAGE, report_page(report))
    write_atomic(folder / MARKDOWN, report_markdown(report))
    return Validation(report, folder)


def _require_writable(folder: Path) -> None:
    """Check before minutes of measuring that the report can be written."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(
            f"the report cannot be written to `{folder}`",
            where=f"`{existing}` is {'not writable' if existing.is_dir() else 'not a folder'}",
            fix="name another folder with `--out`",
        )


@contextmanager
def _evaluation_set(ref: ModelRef, options: ValidateOptions) -> Iterator[EvaluationSet]:
    if options.data is not None:
        with _prepared(ref.loaded, str(options.data)) as corpus:
            yield rows_of_file(corpus, str(options.data))
    else:
        yield rows_of_corpus(options.corpus) if options.corpus is not None else held_out_rows(ref)


@contextmanager
def _prepared(loaded: LoadedConfig, data: str) -> Iterator[Corpus]:
    """Build a temporary corpus of a file, `FILE` or `FILE#LIMIT`, with the tokenizer and template of the config."""
    path, _, limit = data.rpartition("#") if data.rpartition("#")[2].isdecimal() else (data, "", "")
    sources = loaded.config.data.sources
    # Read like the rows of the run: the same columns, the same system prompt.
    source = sources[0].model_dump(exclude_unset=True, exclude={"path", "limit", "share"}) if sources else {}
    source |= {"path": str(Path(path).absolute()), **({"limit": int(limit)} if limit else {})}
    with tempfile.TemporaryDirectory(prefix="tunewell-validate-") as folder:
        tree = loaded.config.model_dump() | {"corpus": str(Path(folder) / "corpus")}
        tree["data"] = loaded.config.data.model_dump() | {"sources": [source], "held_out": 0.0}
        try:
            corpus = prepare(replace(loaded, config=Config.model_validate(tree))).corpus
        except UserError as error:
            raise UserError(f"`{data}` cannot be used: {error.what}", where=error.where, fix=error.fix) from error
        yield open_corpus(corpus)
