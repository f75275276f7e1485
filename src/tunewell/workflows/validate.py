"""`tunewell validate`: judge a run, an adapter or a model, and leave a verdict that a person can act on."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.files import write_atomic
from tunewell.core.optional import import_optional
from tunewell.core.progress import ProgressListener, silent
from tunewell.core.units import count
from tunewell.data.corpus.reader import Corpus, open_corpus
from tunewell.evaluation.report.markdown import report_markdown
from tunewell.evaluation.report.page import report_page
from tunewell.evaluation.session import EvaluationSession, EvaluationSet, ValidateOptions
from tunewell.inference.model_ref import ModelRef
from tunewell.records.events import plain
from tunewell.records.manifest import Manifest
from tunewell.records.report import MARKDOWN, PAGE, Report, Validation, write_report
from tunewell.runs.resolve import resolve_model
from tunewell.workflows.validate_data import prepared


def validate(
    place: str | Path | None = None,
    *,
    order: ValidateOptions | None = None,
    progress: ProgressListener = silent,
    **options: Any,
) -> Validation:
    """Judge a run (by default the one of the config here), an adapter or a model, and write the report.

    `options` are fields of the order: `validate("run", data="more.jsonl")`. Raises UserError when there is nothing to
    judge or nothing to judge it on.
    """
    order = replace(order or ValidateOptions(), **options)
    subject = resolve_model(
        place, checkpoint=order.checkpoint, base=order.base, template=order.template, sets=order.sets
    )
    folder = order.out or (subject.path if subject.kind == "run" and subject.path else Path("report"))
    _refuse_early(folder, order)
    with _documents(subject, order) as material:
        sitting = EvaluationSession(subject, order, material, progress)
        # Rows and answers may hold secrets too, and pages are sent to others.
        report = Report.model_validate(plain(sitting.judge().model_dump(mode="python")))
    folder.mkdir(parents=True, exist_ok=True)
    write_report(folder, report)
    write_atomic(folder / PAGE, report_page(report))
    write_atomic(folder / MARKDOWN, report_markdown(report))
    return Validation(report, folder)


def _refuse_early(folder: Path, order: ValidateOptions) -> None:
    """Refuse what would only be found out after minutes of measuring; nothing is made yet."""
    if order.lm_eval:
        import_optional("lm_eval", extra="lm-eval", purpose="`validate --lm-eval`")
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UserError(
            f"no report can be written into `{folder}`",
            where=f"`{there}` is {'not writable' if there.is_dir() else 'no folder'}",
            fix="name another folder with `--out`",
        )


@contextmanager
def _documents(subject: ModelRef, order: ValidateOptions) -> Iterator[EvaluationSet]:
    if order.data is not None:
        with prepared(subject.loaded, str(order.data)) as corpus:
            yield EvaluationSet(corpus, str(order.data), _dropped(corpus.manifest))
    elif order.corpus is not None:
        corpus = open_corpus(order.corpus)
        yield EvaluationSet(corpus.held_out if len(corpus.held_out) else None, f"the held-out rows of {order.corpus}")
    elif subject.corpus is not None:
        corpus = open_corpus(subject.corpus)
        _refuse_other_rows(subject, corpus)
        yield EvaluationSet(corpus.held_out if len(corpus.held_out) else None, "the held-out rows of the run")
    elif subject.kind == "run":
        raise UserError(
            f"the corpus `{subject.loaded.config.corpus}` of the run is gone",
            fix="judge it on a file with `--data`, or make the corpus again with `tunewell prepare`",
        )
    else:
        raise UserError(f"there is nothing to judge `{subject.name}` on", fix="name a file of rows with `--data`")


def _dropped(manifest: Manifest) -> list[str]:
    """Tell of rows that are not judged on; what was dropped from a run's own corpus is in its ledger."""
    number = sum(manifest.dropped.values())
    if not number:
        return []
    kinds = ", ".join(f"{many} {kind}" for kind, many in manifest.dropped.items())
    return [f"{count(number)} of {count(manifest.rows_in, 'row')} could not be judged on: {kinds}"]


def _refuse_other_rows(subject: ModelRef, corpus: Corpus) -> None:
    plan = subject.plan
    if plan is not None and plan.corpus_sha256 != corpus.manifest.corpus_sha256:
        raise UserError(
            "the corpus was made anew since the run: its held-out rows may have been trained on",
            where=str(corpus.path),
            fix="judge it on a file with `--data`, or put the old corpus back",
        )
