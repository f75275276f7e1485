"""`tunewell validate --against`: evaluate two runs on the same rows, and compare them."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.files import stable_json, write_atomic
from tunewell.core.progress import ProgressListener
from tunewell.evaluation.compare import Comparison, compare
from tunewell.evaluation.session import ValidateOptions, shared_rows
from tunewell.inference.chat_model import ModelRef
from tunewell.records.report import Validation
from tunewell.runs.resolve import resolve_model
from tunewell.workflows.validate import validate

COMPARISON = "comparison.json"


@dataclass(frozen=True)
class ValidationPair:
    """Two evaluations and their comparison."""

    this: Validation
    other: Validation
    comparison: Comparison
    notes: list[str]


def validate_against(
    model: str | Path | None, other: str | Path, *, options: ValidateOptions, progress: ProgressListener
) -> ValidationPair:
    """Evaluate two runs on the rows of the first if both use the same tokens, else each on its own rows."""
    this_ref = resolve_model(model, checkpoint=options.checkpoint, base=options.base, sets=options.sets)
    other_ref = resolve_model(other, sets=options.sets)
    if options.data is None and other_ref.kind != "run":
        raise UserError(
            f"`{other}` is not a run and has no rows to compare on", fix="name a file of rows with `--data`"
        )
    corpus, notes = (None, []) if options.data is not None else shared_rows(this_ref, other_ref)
    this = validate(model, options=options, progress=progress)
    other_options = replace(
        options, corpus=corpus or options.corpus, checkpoint="best", base=None, out=this.folder / "against"
    )
    validated = validate(other, options=other_options, progress=progress)
    comparison = compare(this.report, validated.report, configs=(_config(this_ref), _config(other_ref)))
    write_atomic(this.folder / COMPARISON, stable_json(comparison.as_json()))
    return ValidationPair(this, validated, comparison, notes)


def _config(ref: ModelRef) -> dict[str, Any]:
    if ref.plan is not None:
        return {key: value for key, value in ref.plan.config.items() if key not in ("run", "corpus")}
    return ref.loaded.config.model_dump(mode="json", exclude_unset=True)
