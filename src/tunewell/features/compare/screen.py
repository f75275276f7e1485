"""The screen of `compare`: answers, metrics, differences, settings, curves and changed answers of several columns."""

from typing import TYPE_CHECKING

from tunewell.cli.render import bar_table, cell_width, hanging, is_utf8, shortened, table, width
from tunewell.core.units import count
from tunewell.features.compare.page import (
    answer_rows,
    describe_difference,
    format_metric,
    format_resource,
    right_chart,
)
from tunewell.runs.loss_curve import draw_curves, has_curve, letter

if TYPE_CHECKING:
    from tunewell.evaluation.comparison import ChangedAnswer, ColumnComparison, ColumnDifference, Row
    from tunewell.features.compare.workflow import RunComparison

_MAX_DIFFERENCES = 6
_MAX_EXAMPLES = 3
_MIN_CELL = 8
_ONE_LINE = 60
"""Columns from which an answer is one line; in fewer columns, it may take two."""


def compare_screen(found: "RunComparison") -> str:
    """Return a comparison as one screen. Columns are headed by the letters a, b, c ..."""
    comparison = found.comparison
    letters = [letter(index) for index in range(len(comparison.names))]
    chart = right_chart(comparison, list(map(" ".join, zip(letters, comparison.names, strict=True))))
    shown = bar_table(chart)
    names = [hanging("", row.label) for row in chart.rows if row.label not in shown]
    rows = [["", *letters]]
    rows += [[name, *values] for name, values in answer_rows(comparison)]
    if comparison.metrics:
        rows.append(["verdict", *comparison.verdicts])
    rows += [[row.name, *(format_metric(row.name, value) for value in row.values)] for row in comparison.metrics]
    rows += [[row.name, *(format_resource(value) for value in row.values)] for row in comparison.resources]
    right = range(1, len(letters) + 1)
    parts = [*names, shown, "", table(rows, right=list(right))]
    for title, differing in (("settings that differ", comparison.settings), ("data that differ", comparison.data)):
        if differing:
            parts += ["", table([[title, *letters], *(_cut_row(row, len(letters)) for row in differing)])]
        elif comparison.metrics:
            parts += ["", f"{title}: none"]
    if has_curve(comparison.lines):
        room = max(20, min(60, width() - 12))
        parts += ["", draw_curves(comparison.lines, width=room, is_ascii=not is_utf8())]
    parts.append("")
    parts += [hanging("", describe_difference(one)) for one in _important(comparison)]
    if len(comparison.differences) > _MAX_DIFFERENCES:
        parts.append(f"all {count(len(comparison.differences))} pairs: see the page")
    asked = (
        f"{count(comparison.num_common, 'question')} asked in all columns, {comparison.num_changed} answered "
        "differently"
    )
    parts.append(hanging("", asked))
    for change in comparison.wrong_first[:_MAX_EXAMPLES]:
        parts.append(_example(change, letters))
    parts += [hanging("note: ", note) for note in comparison.notes]
    if (advice := comparison.recommendation) is not None:
        label = f"recommended: {advice.column}: " if advice.column else "no recommendation: "
        parts += ["", hanging("", f"{label}{advice.because}")]
    parts.append(hanging("wrote ", f"`{found.page}`; open it in a browser"))
    return "\n".join(parts)


def _important(comparison: "ColumnComparison") -> "list[ColumnDifference]":
    """Return the differences to show: all if they are few, else those of the column with the most right answers."""
    if len(comparison.differences) <= _MAX_DIFFERENCES:
        return comparison.differences
    best = max(zip(comparison.counts, comparison.names, strict=True), key=lambda pair: pair[0].right)[1]
    return [one for one in comparison.differences if best in (one.first, one.second)]


def _cut_row(row: "Row", num_columns: int) -> list[str]:
    room = max(_MIN_CELL, (width() - cell_width(row.name) - 3 * num_columns) // num_columns)
    return [row.name, *(shortened("-" if value is None else str(value), room) for value in row.values)]


def _example(change: "ChangedAnswer", letters: list[str]) -> str:
    room = width() - 14
    longest = room if room >= _ONE_LINE else 2 * room - 3
    lines = [hanging("  ", shortened(change.question, 2 * width() - 7))]
    lines.append(hanging("    expected  ", shortened(change.reference, longest)))
    for mark, answer, judged in zip(letters, change.answers, change.marks, strict=True):
        lines.append(hanging(f"    {mark} {judged:7} ", shortened(answer or "(empty)", longest)))
    return "\n".join(lines)
