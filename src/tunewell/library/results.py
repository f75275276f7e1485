"""Results of library calls: workflow results with a short `repr` and an HTML view for notebooks."""

from collections.abc import Iterable
from dataclasses import fields
from html import escape
from typing import Any, TypeVar

from tunewell.core.units import count, duration, size_bytes
from tunewell.planning.result import PlanResult as PlanRecord
from tunewell.records.report import Curve, Report
from tunewell.records.report import Validation as ValidationRecord
from tunewell.runs.loss_curve import loss_svg
from tunewell.runs.result import TrainResult as TrainRecord
from tunewell.workflows.prepare import PrepareResult as PrepareRecord

_MAX_ANSWERS = 5
_COLORS = {"PASS": "#1a7f37", "UNPROVEN": "#57606a", "WEAK": "#9a6700", "FAIL": "#cf222e"}
R = TypeVar("R")


class TrainResult(TrainRecord):
    """The result of `tunewell.train`: the run folder, how the run ended, its losses and its verdict."""

    def __repr__(self) -> str:
        verdict = "" if self.validation is None else f", verdict={self.validation.report.verdict}"
        loss = "" if self.last_loss is None else f", loss={self.last_loss:.4f}"
        return f"TrainResult(run={str(self.run)!r}, status={self.status!r}, steps={self.steps}{loss}{verdict})"

    def _repr_html_(self) -> str:
        rows = [
            ("run", self.run),
            ("status", f"{self.status}: {self.reason}"),
            ("steps", f"{count(self.steps)} of {count(self.num_steps)}"),
            ("time", duration(self.seconds)),
            ("next", self.next_command),
        ]
        parts = [html_table(rows)]
        if len(self.losses) > 1:
            curve = Curve(train=self.losses, held_out=self.held_out, best_step=self.best_step)
            parts.append(loss_svg(curve, title=self.run.name))
        if self.validation is not None:
            parts.insert(0, _verdict(self.validation.report))
            parts += [_metrics(self.validation.report), _answers(self.validation.report)]
        return "".join(parts)


class PrepareResult(PrepareRecord):
    """The result of `tunewell.prepare`: the corpus folder and its manifest."""

    def __repr__(self) -> str:
        manifest = self.manifest
        return (
            f"PrepareResult(corpus={str(self.corpus)!r}, documents={manifest.documents}, "
            f"held_out={manifest.held_out}, dropped={sum(manifest.dropped.values())})"
        )

    def _repr_html_(self) -> str:
        manifest = self.manifest
        rows: list[tuple[str, object]] = [
            ("corpus", self.corpus),
            ("rows", count(manifest.rows_in)),
            ("documents", f"{count(manifest.documents)} to train on, {count(manifest.held_out)} held out"),
        ]
        rows += [(f"dropped: {reason}", count(number)) for reason, number in manifest.dropped.items() if number]
        return html_table(rows)


class PlanResult(PlanRecord):
    """The result of `tunewell.plan`: the prediction, and what would make the run fit."""

    def __repr__(self) -> str:
        memory, seconds = self.prediction.memory, self.prediction.seconds
        return (
            f"PlanResult(fits={self.fits}, memory={size_bytes(memory.uncached_bytes)!r}, "
            f"time='{duration(seconds.low)} to {duration(seconds.high)}')"
        )

    def _repr_html_(self) -> str:
        memory, seconds = self.prediction.memory, self.prediction.seconds
        free = "unknown" if memory.free_bytes is None else size_bytes(memory.free_bytes)
        rows: list[tuple[str, object]] = [
            ("fits", "yes" if self.fits else "no"),
            ("memory", f"{size_bytes(memory.uncached_bytes)}, {free} free on {self.device.label}"),
            ("time", f"{duration(seconds.low)} to {duration(seconds.high)}"),
            ("micro-batch", f"{count(self.plan.micro_batch_tokens.value)} tokens"),
        ]
        rows += [(rung.name, "fits" if rung.prediction.fits else "does not fit") for rung in self.ladder]
        rows += [(row.card.name, "fits" if row.prediction and row.prediction.fits else "no") for row in self.cards]
        return html_table([*rows, *(("note", note) for note in self.notes)])


class Validation(ValidationRecord):
    """The result of `tunewell.validate`: the verdict, the report and its page."""

    @property
    def verdict(self) -> str:
        """PASS, WEAK, FAIL or UNPROVEN."""
        return self.report.verdict

    def __repr__(self) -> str:
        return f"Validation(verdict={self.report.verdict!r}, page={str(self.page)!r})"

    def _repr_html_(self) -> str:
        return (
            _verdict(self.report) + _metrics(self.report) + _answers(self.report) + html_table([("report", self.page)])
        )


def as_result(kind: type[R], record: Any) -> R:
    """Convert a workflow's result to the library's class, which has the same fields."""
    return kind(**{field.name: getattr(record, field.name) for field in fields(record)})


def _verdict(report: Report) -> str:
    color = _COLORS.get(report.verdict, "inherit")
    reasons = "".join(f"<li>{escape(reason.what)} <i>{escape(reason.next)}</i></li>" for reason in report.reasons)
    return (
        f"<p><b style='color:{color}'>{report.verdict}</b> {escape(report.summary)}</p>"
        + (f"<ul>{reasons}</ul>" if reasons else "")
    )  # fmt: skip


def _metrics(report: Report) -> str:
    rows: list[tuple[str, object]] = []
    for name, result in report.metrics.items():
        base, tuned = ("-" if value is None else f"{value:.4g}" for value in (result.base, result.tuned))
        failed = f"; {count(result.failed)} failed: {result.error}" if result.failed else ""
        rows.append((name, f"base {base}, tuned {tuned}{failed}"))
    return html_table(rows) if rows else ""


def _answers(report: Report) -> str:
    if not report.exchanges:
        return ""
    lines = "".join(
        f"<tr><td>{escape(own.question)}</td><td>{escape(own.reference)}</td>"
        f"<td>{escape(own.base.text) if own.base else ''}</td><td>{escape(own.tuned.text)}</td></tr>"
        for own in report.exchanges[:_MAX_ANSWERS]
    )
    head = "<tr><th>question</th><th>expected</th><th>base model</th><th>trained model</th></tr>"
    return f"<table style='text-align:left'>{head}{lines}</table>"


def html_table(rows: Iterable[tuple[str, object]]) -> str:
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in rows)
    return f"<table style='text-align:left'>{cells}</table>"
