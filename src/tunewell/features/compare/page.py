"""Write `compare.html`: several columns side by side, as one self-contained page without scripts or requests."""

from typing import Any

from markupsafe import Markup

from tunewell.core.html import page_environment
from tunewell.core.units import count, percent
from tunewell.evaluation.comparison import ColumnComparison, ColumnDifference
from tunewell.runs.loss_curve import curves_svg

SHARES = ("right", "faulty answers")
"""Metrics that are shares of the answers."""


def comparison_page(comparison: ColumnComparison) -> str:
    """Return a comparison as an HTML page; the output is deterministic."""
    has_curves = any(line.best for line in comparison.lines)
    return (
        page_environment("tunewell.features.compare")
        .get_template("comparison.html")
        .render(
            comparison=comparison,
            answers=answer_rows(comparison),
            metrics=[
                (row.name, [format_metric(row.name, value) for value in row.values]) for row in comparison.metrics
            ],
            resources=[(row.name, [format_resource(value) for value in row.values]) for row in comparison.resources],
            tables=[
                (title, [(row.name, ["-" if value is None else value for value in row.values]) for row in rows])
                for title, rows in (
                    ("Settings that differ", comparison.settings),
                    ("Data that differ", comparison.data),
                )
            ],
            differences=[describe_difference(one) for one in comparison.differences],
            curves=Markup(curves_svg(comparison.lines, title="held-out loss", is_page=True)) if has_curves else None,
        )
    )


def answer_rows(comparison: ColumnComparison) -> list[tuple[str, list[str]]]:
    """Return the table of answers: the number of right, wrong, refused and invented answers, and of misses by kind.

    Lines without a value in any column are left out.
    """
    counts = comparison.counts
    rows: list[tuple[str, list[str]]] = [
        (f"right of {count(counts[0].judged)}", [count(own.right) for own in counts]),
        ("  95% interval", [f"{100 * own.low:.0f}-{100 * own.high:.0f}%" if own.judged else "-" for own in counts]),
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
