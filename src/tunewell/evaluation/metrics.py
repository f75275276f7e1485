"""User-defined metrics: `fn(question, answer, reference) -> number`, averaged over the held-out questions."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import cast

from tunewell.core.errors import UserError
from tunewell.data.rows.functions import load_row_function
from tunewell.records.report import Answer, AnsweredQuestion, MetricResult

Metric = Callable[[str, str, str], float | bool]
"""Function of a question, an answer and a reference that returns a number or a bool."""


def load_metrics(references: Sequence[str], *, base: Path) -> dict[str, Metric]:
    """Load the functions of `verdict.metrics` by name; raise UserError if one is missing or two share a name."""
    metrics: dict[str, Metric] = {}
    for reference in references:
        name = reference.rpartition(":")[2]
        if name in metrics:
            raise UserError(f"`verdict.metrics` names two functions `{name}`", fix="rename one of them")
        metrics[name] = cast(Metric, load_row_function(reference, batch=None, base=base).function)
    return metrics


def compute_metrics(
    metrics: Mapping[str, Metric], questions: Sequence[AnsweredQuestion]
) -> tuple[dict[str, MetricResult], list[str]]:
    """Return the mean of each metric for the base and the tuned model, and a note for each metric that failed.

    If a metric raises an exception or does not return a finite number, that answer is left out of its mean.
    """
    results, notes = {}, []
    for name, metric in metrics.items():
        base, base_errors = _mean(metric, [(question, question.base) for question in questions if question.base])
        tuned, errors = _mean(metric, [(question, question.tuned) for question in questions])
        errors += base_errors
        results[name] = MetricResult(
            base=base, tuned=tuned, questions=len(questions), failed=len(errors), error=next(iter(errors), None)
        )
        if errors:
            more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
            notes.append(f"the metric `{name}` failed on {errors[0]}{more}; the mean leaves these answers out")
    return results, notes


def _mean(metric: Metric, answers: Sequence[tuple[AnsweredQuestion, Answer]]) -> tuple[float | None, list[str]]:
    """Return the mean over the scored answers, and an error message `FILE row N: ERROR` for each other answer."""
    values, errors = [], []
    for question, answer in answers:
        try:
            value = metric(question.question, answer.text, question.reference)
            if isinstance(value, str) or not math.isfinite(value):  # math.isfinite also takes numbers of numpy
                raise TypeError(f"the metric returned {value!r}, not a finite number")
            values.append(float(value))
        except (Exception, SystemExit) as error:  # noqa: BLE001  an error in the user's function must not stop the evaluation
            errors.append(f"{question.source} row {question.row}: {type(error).__name__}: {error}")
    return fmean(values) if values else None, errors
