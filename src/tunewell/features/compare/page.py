"""Write `compare.html`: several columns side by side, as one self-contained page without scripts or requests."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from tunewell.core.html import page_environment
from tunewell.core.plot import BarChart, BarRow
from tunewell.core.units import count, listed, percent
from tunewell.evaluation.comparison import ColumnComparison, ColumnDifference
from tunewell.runs.loss_curve import curves, has_curve

SHARES = ("right", "faulty answers")
"""Metrics that are shares of the answers."""


def comparison_page(comparison: ColumnComparison) -> str:
    """Return a comparison as an HTML page; the output is deterministic."""
    template = page_environment("tunewell.features.compare").get_template("comparison.html")
    return template.render(
        comparison=comparison,
        title=_title(comparison),
        chart=right_chart(comparison, comparison.names),
        answers=answer_rows(comparison),
        curves=partial(curves, comparison.lines) if has_curve(comparison.lines) else None,
        describe=describe_difference,
        metric=format_metric,
        resource=format_resource,
    )


def _title(comparison: ColumnComparison) -> str:
    """Return the models and their rows: `base and run, with and without retrieval, on held-out rows of shop.jsonl`."""
    models = list(dict.fromkeys(name.partition(" + ")[0] for name in comparison.names))
    both = ", with and without retrieval," if len(models) < len(comparison.names) else ""
    named = f"{listed(models[:-1])} and {models[-1]}".removeprefix(" and ")
    return f"{named}{both} on {comparison.rows or 'the same rows'}"


def right_chart(comparison: ColumnComparison, labels: Sequence[str]) -> BarChart:
    """Return the share of right answers of each column with its 95% interval; the recommended column is marked."""
    advice, rows = comparison.recommendation, list[BarRow]()
    for name, label, own in zip(comparison.names, labels, comparison.counts, strict=True):
        interval = f"{100 * own.low:.0f}-{100 * own.high:.0f}%" if own.judged else "-"
        texts = f"{count(own.right)} of {count(own.judged)}", interval
        is_marked = advice is not None and advice.column == name
        rows.append(BarRow(label, texts, interval=(own.low, own.share, own.high), is_marked=is_marked))
    ticks = ((0.0, "0%"), (0.5, "50%"), (1.0, "100%"))
    return BarChart("right answers", ("right", "95% interval"), rows, 1.0, ticks=ticks, marked="recommended")


def answer_rows(comparison: ColumnComparison) -> list[tuple[str, list[str]]]:
    """Return the table of other answers: the number of wrong, refused and invented answers, and of misses by kind.

    Lines without a value in any column are left out.
    """
    counts = comparison.counts
    rows: list[tuple[str, list[str]]] = [
        ("wrong", [count(own.wrong) for own in counts]),
        ("refused", [count(own.refused) for own in counts]),
    ]
    if any(own.num_removed is not None for own in counts):
        most = max(own.num_removed or 0 for own in counts)
        rows += [
            (f"invented of {count(most)}", ["-" if own.invented is None else count(own.invented) for own in counts]),
            ("search misses", ["-" if own.search_misses is None else count(own.search_misses) for own in counts]),
            ("reading misses", ["-" if own.reading_misses is None else count(own.reading_misses) for own in counts]),
        ]
    return rows


def format_metric(name: str, value: float | None) -> str:
    """Format a metric: shares as percentages, losses with four decimals."""
    if value is None:
        return "-"
    return percent(value) if name in SHARES else f"{value:.4f}"


def format_resource(value: Any) -> str:
    """Format a speed, a time or a size."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.2f}"


def describe_difference(one: ColumnDifference) -> str:
    """Return how two columns differ in right answers, in one sentence."""
    if not one.num_questions:
        return f"{one.second}: no question in common with {one.first} has an answer that is right or wrong"
    points = (
        f"{100 * one.difference:+.1f} percentage points (95% interval {100 * one.low:+.1f} to {100 * one.high:+.1f})"
    )
    shown = "difference shown" if one.is_shown else "no difference shown"
    if one.more_questions is not None:
        shown += f" (about {count(one.more_questions, 'more question')} would show a difference of this size)"
    counts = f"{one.became_right} became right, {one.became_wrong} became wrong"
    return f"{one.second} against {one.first}: {points}, {shown}; of {one.num_questions} questions, {counts}"
