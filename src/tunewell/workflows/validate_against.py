"""`tunewell validate --against`: judge two runs on the same rows, and say what differs."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.files import stable_json, write_atomic
from tunewell.core.progress import ProgressListener
from tunewell.evaluation.compare import Comparison, compare
from tunewell.inference.model_ref import ModelRef
from tunewell.records.manifest import read_manifest
from tunewell.runs.resolve import resolve_model
from tunewell.workflows.validate import ValidateOptions, Validation, validate

COMPARISON = "comparison.json"


@dataclass(frozen=True)
class Against:
    """Two judgements and their comparison."""

    this: Validation
    other: Validation
    comparison: Comparison
    notes: list[str]


def validate_against(
    place: str | Path | None, other: str | Path, *, order: ValidateOptions, progress: ProgressListener
) -> Against:
    """Judge a run and another on the first one's rows where both read the same tokens, else each on its own."""
    mine = resolve_model(place, checkpoint=order.checkpoint, base=order.base, sets=order.sets)
    theirs = resolve_model(other, sets=order.sets)
    if order.data is None and theirs.kind != "run":
        raise UserError(
            f"`{other}` is no run, so it has no rows to be compared on", fix="name a file of rows with `--data`"
        )
    same, notes = _same_rows(order, mine, theirs)
    this = validate(place, order=order, progress=progress)
    folder = this.folder / "against"
    judged = validate(other, order=replace(same, checkpoint="best", base=None, out=folder), progress=progress)
    comparison = compare(this.report, judged.report, configs=(_config(mine), _config(theirs)))
    write_atomic(this.folder / COMPARISON, stable_json(comparison.as_json()))
    return Against(this, judged, comparison, notes)


def _same_rows(order: ValidateOptions, mine: ModelRef, theirs: ModelRef) -> tuple[ValidateOptions, list[str]]:
    if order.data is not None or mine.corpus is None:
        return order, []
    manifest = read_manifest(mine.corpus)
    if theirs.corpus is not None and read_manifest(theirs.corpus).corpus_sha256 == manifest.corpus_sha256:
        return replace(order, corpus=mine.corpus), []
    plan, templates = theirs.plan, [template.sha256 for template in manifest.templates]
    if plan is not None and plan.tokenizer_sha256 == manifest.tokenizer.sha256 and plan.template_sha256s == templates:
        note = "the two learned from other rows; both are judged on the held-out rows of the first"
        return replace(order, corpus=mine.corpus), [f"{note}, which the other may have trained on"]
    return order, ["the two read other tokens or templates, so each is judged on its own held-out rows"]


def _config(subject: ModelRef) -> dict[str, Any]:
    if subject.plan is not None:
        return {key: value for key, value in subject.plan.config.items() if key not in ("run", "corpus")}
    return subject.loaded.config.model_dump(mode="json", exclude_unset=True)
