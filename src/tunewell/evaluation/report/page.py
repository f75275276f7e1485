"""Write `report.html`: the report as one self-contained page without scripts or requests.

A content security policy allows only the page's own style sheet, by its hash, so model output cannot run or load
anything.
"""

import base64
import hashlib
from functools import lru_cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from tunewell.config.rules import VerdictRules
from tunewell.core.units import count, duration, percent
from tunewell.evaluation.report.view import (
    CODE,
    EMPTY,
    FAULT_WORDS,
    all_metrics,
    declared_order,
    key_metrics,
    loss,
    nonfinite_text,
    setting,
    single_line,
    sorted_answers,
    source_metrics,
    visible,
)
from tunewell.records.plan import Chosen, Plan
from tunewell.records.report import Curve, Report
from tunewell.runs.loss_curve import LossPlot

HEADLINES = {
    "PASS": "No problems found.",
    "WEAK": "Usable with care: read the reasons below.",
    "FAIL": "Not usable.",
}
CANNOT_TELL = "Not enough held-out data for a verdict."
_WIDE, _NARROW = (760, 320), (340, 260)
_MAX_EVALUATIONS = 40
_MAX_SCORES = 200
_LONG_CHARS, _LONG_LINES = 500, 8
"""Longer texts get a scroll box, which must be reachable by keyboard."""


def report_page(report: Report) -> str:
    """Return a report as an HTML page; the output is deterministic."""
    template, style = _template(), _style()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return template.render(
        report=report,
        style=Markup(style),
        style_hash=f"sha256-{digest}",
        headline=_headline(report),
        key_metrics=key_metrics(report),
        metrics=all_metrics(report),
        source_metrics=source_metrics(report),
        curve=_curve(report.curve),
        answers=sorted_answers(report),
        row_counts=_row_counts(report),
        plan=_chosen(report.plan, known=Plan.model_fields),
        thresholds=_chosen(report.thresholds, known=VerdictRules.model_fields),
        seconds=sorted(report.seconds.items(), key=lambda item: (-item[1], item[0])),
        bad_weights=sorted(report.bad_weights.items(), key=lambda item: (-item[1], item[0])),
        scores=_scores(report.lm_eval)[:_MAX_SCORES],
    )


@lru_cache(maxsize=1)
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("tunewell.evaluation.report", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "visible": visible,
        "line": single_line,
        "prose": prose,
        "answer_text": _answer_text,
        "is_long": _is_long,
        "fault": lambda name: FAULT_WORDS[name],
        "count": count,
        "share": percent,
        "duration": duration,
        "loss": loss,
        "setting": setting,
        "f1": lambda value: nonfinite_text(value) or f"{value:.2f}",
        "number": lambda value: nonfinite_text(value) or f"{value:,.4g}",
    }
    return environment.get_template("report.html")


@lru_cache(maxsize=1)
def _style() -> str:
    text = files("tunewell.evaluation.report").joinpath("page/report.css").read_text(encoding="utf-8")
    return "\n" + text.replace("\r\n", "\n")


def prose(text: str) -> Markup:
    """Return a sentence of the report as HTML, with parts between backticks as code."""
    code, parts = Markup("<code>{}</code>"), enumerate(CODE.split(visible(text)))
    return Markup("").join(code.format(part) if index % 2 else escape(part) for index, part in parts)


def _headline(report: Report) -> str:
    cannot_tell = bool(report.reasons) and report.reasons[0].code == "not_enough_evidence"
    return CANNOT_TELL if cannot_tell else HEADLINES[report.verdict]


def _answer_text(text: str) -> str:
    if text.strip():
        return visible(text)
    return f"{EMPTY}, {count(len(text), 'blank character')}" if text else EMPTY


def _is_long(text: str) -> bool:
    return len(text) > _LONG_CHARS or text.count("\n") > _LONG_LINES


def _chosen(values: dict[str, Chosen[Any]], *, known: Any) -> list[tuple[str, str, str]]:
    names = declared_order(values, known)
    return [(name.replace("_", " "), setting(values[name].value), values[name].because) for name in names]


def _row_counts(report: Report) -> dict[str, Any] | None:
    if report.ledger is None:
        return None
    counts = report.ledger
    by_reason = sorted(counts.dropped.items(), key=lambda item: (-item[1], item[0]))
    dropped = sum(counts.dropped.values())
    total = counts.documents + counts.held_out + dropped
    return {
        "by_reason": [(single_line(name).replace("_", " "), rows) for name, rows in by_reason],
        "total": total,
        "missing": counts.rows - total,
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
