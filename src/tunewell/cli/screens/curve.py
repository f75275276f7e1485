"""Draw the loss curve in the terminal, with a line for training and marks for evaluations."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tunewell.core.units import count
from tunewell.runs.curves import MAX_LINES, Line, letter, shown_together
from tunewell.runs.loss_curve import Points, ceiling, cut, drawable, smooth, smoothing_window

_BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bit of each dot in a braille character, by row and column."""
_LABELLED_ROWS = 3


def draw_curve(losses: Points, held_out: Points, *, width: int = 60, height: int = 10, is_ascii: bool = False) -> str:
    """Draw losses over steps in `width` by `height` characters, with axes. Return "" if no loss is finite.

    2.41 ┤⢇
         │ ⠑⢄⡀    o
    1.50 ┤   ⠈⠉⠒⠤⠤⢄⣀⣀ *
         └──────────────
          1           95
    """
    evaluations = drawable(held_out)
    if not drawable(losses) and not evaluations:
        return ""
    limit = ceiling(losses, held_out)
    line = smooth(cut(losses, limit))
    marks = cut(evaluations, limit)
    canvas = _Canvas(width, height, is_ascii=is_ascii).over([*line, *marks])
    canvas.draw_line(line)
    canvas.draw_marks(marks)
    return "\n".join([*canvas.rows(), *_legend(losses, held_out, limit=limit)])


def draw_curves(lines: Sequence[Line], *, width: int = 60, height: int = 12, is_ascii: bool = False) -> str:
    """Draw the held-out losses of several runs, each with the letter of the run at its evaluations."""
    known, limit = shown_together(lines)
    if not known:
        return ""
    canvas = _Canvas(width, height, is_ascii=is_ascii).over(known)
    for index, line in enumerate(lines[:MAX_LINES]):
        points = cut(line.held_out, limit)
        canvas.draw_line(points)
        canvas.draw_marks(drawable(points), mark=letter(index))
    rows = [f"{letter(index)} {line.name}" for index, line in enumerate(lines[:MAX_LINES])]
    left_out = [f"not drawn: {count(len(lines) - MAX_LINES, 'more run')}"] if len(lines) > MAX_LINES else []
    return "\n".join([*canvas.rows(), "held-out loss:", *rows, *left_out])


@dataclass
class _Canvas:
    """A grid of dots, several per character, overlaid with marks of one character each."""

    width: int
    height: int
    is_ascii: bool
    steps: tuple[int, int] = (0, 1)
    values: tuple[float, float] = (0.0, 1.0)
    dots: set[tuple[int, int]] = field(default_factory=set)
    marks: dict[tuple[int, int], str] = field(default_factory=dict)

    def over(self, points: Points) -> "_Canvas":
        """Set the axes so that they include all points, and return the canvas."""
        steps = [step for step, _ in points]
        values = [value for _, value in drawable(points)]
        low, high = min(values), max(values)
        if high - low <= 1e-9 * max(abs(high), 1e-9):
            middle, half = (low + high) / 2, max(abs(high) * 0.05, 1e-3)
            low, high = middle - half, middle + half
        self.steps, self.values = (min(steps), max(steps)), (low, high)
        return self

    @property
    def _dots_across(self) -> int:
        return self.width * (1 if self.is_ascii else 2)

    @property
    def _dots_down(self) -> int:
        return self.height * (2 if self.is_ascii else 4)

    def _dot(self, step: int, value: float) -> tuple[int, int]:
        (first, last), (low, high) = self.steps, self.values
        across = (step - first) / max(last - first, 1)
        down = (high - value) / (high - low)
        return round(across * (self._dots_across - 1)), round(down * (self._dots_down - 1))

    def draw_line(self, points: Points) -> None:
        """Draw a line through the points, with a gap at each non-finite value."""
        before: tuple[int, int] | None = None
        for step, value in points:
            here = self._dot(step, value) if math.isfinite(value) else None
            if here is not None:
                self._join(before or here, here)
            before = here

    def _join(self, one: tuple[int, int], other: tuple[int, int]) -> None:
        length = max(abs(other[0] - one[0]), abs(other[1] - one[1]), 1)
        for number in range(length + 1):
            share = number / length
            self.dots.add((round(one[0] + share * (other[0] - one[0])), round(one[1] + share * (other[1] - one[1]))))

    def draw_marks(self, points: Points, mark: str | None = None) -> None:
        """Mark each point with `o`, and the lowest with `*`; or all of them with `mark`."""
        best = min(points, key=lambda point: point[1], default=None)
        for point in (*points, *([best] if best else [])):
            across, down = self._dot(*point)
            cell = (across * self.width // self._dots_across, down * self.height // self._dots_down)
            self.marks[cell] = mark or ("*" if point == best else "o")

    def rows(self) -> list[str]:
        """Return the grid as lines of text, with labels on both axes."""
        labels = self._value_labels()
        margin = max(map(len, labels.values()))
        side, tick, corner, floor = ("|", "+", "+", "-") if self.is_ascii else ("│", "┤", "└", "─")
        lines = []
        for row in range(self.height):
            cells = "".join(self._character(column, row) for column in range(self.width))
            axis = tick if row in labels else side
            lines.append(f"{labels.get(row, ''):>{margin}} {axis}{cells}".rstrip())
        return [*lines, " " * margin + f" {corner}" + floor * self.width, " " * (margin + 2) + self._step_labels()]

    def _character(self, column: int, row: int) -> str:
        if (column, row) in self.marks:
            return self.marks[column, row]
        if self.is_ascii:
            upper, lower = ((column, 2 * row + half) in self.dots for half in range(2))
            return ":" if upper and lower else "'" if upper else "." if lower else " "
        bits = [
            _BRAILLE[down][across]
            for down in range(4)
            for across in range(2)
            if (2 * column + across, 4 * row + down) in self.dots
        ]
        return chr(0x2800 + sum(bits)) if bits else " "

    def _value_labels(self) -> dict[int, str]:
        low, high = self.values
        digits = min(max(2 - math.floor(math.log10(high - low)), 0), 6)
        rows = {round(number * (self.height - 1) / _LABELLED_ROWS) for number in range(_LABELLED_ROWS + 1)}
        return {row: f"{high - (high - low) * row / max(self.height - 1, 1):,.{digits}f}" for row in sorted(rows)}

    def _step_labels(self) -> str:
        first, last = self.steps
        left, middle, right = count(first), count((first + last) // 2), count(last)
        if first == last:
            return f"step {left}"
        spare = self.width - len(left) - len(right)
        if spare < len(middle) + 4 or middle in (left, right):
            return f"{left}{' ' * max(spare, 1)}{right} step"
        return f"{left}{middle:^{spare}}{right} step"


def _legend(losses: Points, held_out: Points, *, limit: float | None) -> list[str]:
    trained, evaluations, window = drawable(losses), drawable(held_out), smoothing_window(len(losses))
    lines = []
    if trained:
        lines.append(f"line: training loss{f', mean of {window} steps' if window > 1 else ''}")
    if evaluations:
        lines.append("o held-out loss, * its lowest")
    num_bad = len(losses) - len(trained) + len(held_out) - len(evaluations)
    if num_bad:
        lines.append(f"left out: {count(num_bad, 'value')} that {'is' if num_bad == 1 else 'are'} not finite")
    if limit is not None:
        highest = max(value for _, value in (*trained, *evaluations))
        lines.append(f"cut at {limit:.4g}; the highest value is {highest:.4g}")
    return lines
