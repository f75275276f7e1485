"""The screen of `compare`: metrics, differences, settings, curves and changed answers of several runs."""

from typing import TYPE_CHECKING, Any

from tunewell.cli.render import cell_width, fitting, hanging, is_utf8, one_line, table, width
from tunewell.cli.screens.curve import draw_curves
from tunewell.core.units import count
from tunewell.evaluation.report.comparison import describe_difference, format_metric, format_resource
from tunewell.runs.curves import letter

if TYPE_CHECKING:
    from tunewell.evaluation.columns import ChangedAnswer, Row
    from tunewell.workflows.compare import RunComparison

_MAX_EXAMPLES = 3
_MIN_CELL = 8


def compare_screen(found: "RunComparison") -> str:
    """Return a comparison as one screen. Runs have the letters a, b, c ..., which head the columns."""
    comparison = found.comparison
    letters = [letter(index) for index in range(len(comparison.names))]
    head = [["", *letters]]
    names = "\n".join(hanging(f"{mark} ", name) for mark, name in zip(letters, comparison.names, strict=True))
    rows = [["verdict", *comparison.verdicts]]
    rows += [[row.name, *(format_metric(row.name, value) for value in row.values)] for row in comparison.metrics]
    rows += [[row.name, *(format_resource(value) for value in row.values)] for row in comparison.resources]
    right = range(1, len(letters) + 1)
    parts = [names, "", table([*head, *rows], right=list(right))]
    for title, differing in (("settings that differ", comparison.settings), ("data that differ", comparison.data)):
        if differing:
            parts += ["", table([[title, *letters], *(_cut_row(row, len(letters)) for row in differing)])]
        else:
            parts += ["", f"{title}: none"]
    if curves := draw_curves(comparison.lines, width=max(20, min(60, width() - 12)), is_ascii=not is_utf8()):
        parts += ["", curves]
    parts.append("")
    parts += [hanging("", describe_difference(one)) for one in comparison.differences]
    asked = (
        f"{count(comparison.num_common, 'question')} asked in all runs, {comparison.num_changed} answered differently"
    )
    parts.append(hanging("", asked))
    for change in comparison.changed[:_MAX_EXAMPLES]:
        parts.append(_example(change, letters))
    parts += [hanging("note: ", note) for note in comparison.notes]
    parts.append(f"wrote   `{found.page}`")
    return "\n".join(parts)


def _cut_row(row: "Row", num_columns: int) -> list[str]:
    room = max(_MIN_CELL, (width() - cell_width(row.name) - 3 * num_columns) // num_columns)
    return [row.name, *(_short("-" if value is None else value, room) for value in row.values)]


def _example(change: "ChangedAnswer", letters: list[str]) -> str:
    lines = [f"  {_short(change.question, width() - 2)}", f"    expected  {_short(change.reference, width() - 14)}"]
    for mark, answer, is_right in zip(letters, change.answers, change.right, strict=True):
        judged = "" if is_right is None else "right" if is_right else "wrong"
        lines.append(f"    {mark} {judged:6}  {_short(answer or '(empty)', width() - 14)}")
    return "\n".join(lines)


def _short(value: Any, columns: int) -> str:
    line = one_line(str(value))
    return line if cell_width(line) <= columns else fitting(line, columns - 3) + "..."
