"""Write `report.html`: the report as one self-contained page without scripts or requests."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from jinja2 import Template
from markupsafe import Markup

from tunewell.config.rules import VerdictRules
from tunewell.core.html import page_environment, single_line
from tunewell.core.units import duration, percent
from tunewell.evaluation.report.view import (
    FAULT_WORDS,
    NUM_ORDINARY,
    all_metrics,
    answer_mark,
    declared_order,
    field_rows,
    judge_sentences,
    key_metrics,
    loss,
    nonfinite_text,
    setting,
    sorted_answers,
    source_metrics,
)
from tunewell.records.plan import Chosen, Plan
from tunewell.records.report import HEADLINES, Curve, Report
from tunewell.runs.loss_curve import LossPlot

_WIDE, _NARROW = (760, 320), (340, 260)
_MAX_EVALUATIONS = 40
_MAX_SCORES = 200


def report_page(report: Report) -> str:
    """Return a report as an HTML page; the output is deterministic."""
    return _template().render(
        report=report,
        headline=HEADLINES[report.verdict],
        key_metrics=key_metrics(report),
        metrics=all_metrics(report),
        source_metrics=source_metrics(report),
        curve=_curve(report.curve),
        answers=sorted_answers(report),
        judge_sentences=judge_sentences(report),
        fields=field_rows(report),
        ordinary=report.ordinary[:NUM_ORDINARY],
        row_counts=_row_counts(report),
        plan=_chosen(report.plan, known=Plan.model_fields),
        thresholds=_chosen(report.thresholds, known=VerdictRules.model_fields),
        seconds=_largest_first(report.seconds),
        bad_weights=_largest_first(report.bad_weights),
        scores=_scores(report.lm_eval)[:_MAX_SCORES],
    )


@lru_cache(maxsize=1)
def _template() -> Template:
    environment = page_environment("tunewell.evaluation.report")
    environment.filters |= {
        "answer_mark": answer_mark,
        "fault": lambda name: FAULT_WORDS[name],
        "duration": duration,
        "loss": loss,
        "setting": setting,
        "f1": lambda value: nonfinite_text(value) or f"{value:.2f}",
        "number": lambda value: nonfinite_text(value) or f"{value:,.4g}",
    }
    return environment.get_template("report.html")


def _largest_first(numbers: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(numbers.items(), key=lambda item: (-item[1], item[0]))


def _chosen(values: dict[str, Chosen[Any]], *, known: Any) -> list[tuple[str, str, str]]:
    names = declared_order(values, known)
    return [(name.replace("_", " "), setting(values[name].value), values[name].because) for name in names]


def _row_counts(report: Report) -> dict[str, Any] | None:
    if report.ledger is None:
        return None
    counts = report.ledger
    dropped = sum(counts.dropped.values())
    return {
        "by_reason": [(single_line(name).replace("_", " "), rows) for name, rows in _largest_first(counts.dropped)],
        "total": counts.total,
        "dropped": dropped,
        "supervised": percent(counts.supervised / counts.tokens) if counts.tokens else "",
    }


def _curve(curve: Curve) -> dict[str, Any]:
    plot = LossPlot(curve)
    evaluations = sorted(curve.held_out, key=lambda point: point[0])
    stride = -(-len(evaluations) // _MAX_EVALUATIONS) or 1
    return {
        "pictures": [
            (name, size, Markup(shapes))
            for name, size in (("wide", _WIDE), ("narrow", _NARROW))
            if (shapes := plot.shapes(*size))
        ],
        "legend": [(Markup(key), text) for key, text in plot.legend],
        "description": plot.description,
        "remarks": plot.remarks,
        "is_log": plot.is_log,
        "evaluations": evaluations[::stride],
        "stride": stride,
        "is_empty": not curve.train and not curve.held_out,
    }


def _scores(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """Return the nested results of lm-eval as a flat list of names and values."""
    if isinstance(value, dict) and value and len(path) < 6:
        return [score for key in sorted(value, key=str) for score in _scores(value[key], (*path, str(key)))]
    return [(single_line(" / ".join(path)), setting(value))] if path else []
