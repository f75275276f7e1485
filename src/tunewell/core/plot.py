"""Draw curves over steps, and rows of bars or intervals, with one backend for SVG and one for the terminal.

Colours of an SVG are CSS classes of the page or of the file around it; attributes set them where no class does.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import accumulate
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from tunewell.core.units import count

Points = Sequence[tuple[int, float]]
"""(step, value) pairs in order of steps. A value may be NaN or infinite."""

_CEILING_FACTOR = 1.5
_LARGEST = 1e100
"""Larger values, far beyond fp32, are not drawn, because sums of them could overflow."""
_LOG_RATIO = 20.0
"""From this ratio of highest to lowest value, a log scale is used. A linear one would show only the first steps."""
by_value = itemgetter(1)


# Points: what can be drawn, where it is clipped, and how it is smoothed.


def can_draw(value: float) -> bool:
    """Return whether a value is finite and small enough to be drawn."""
    return math.isfinite(value) and abs(value) < _LARGEST


def drawable(points: Points) -> list[tuple[int, float]]:
    """Return the points whose value can be drawn."""
    return [(step, value) for step, value in points if can_draw(value)]


def ceiling(*curves: Points) -> float | None:
    """Return the value at which curves are clipped, or None if no value is high enough to be clipped.

    A single spike must not flatten the rest, so the limit is 1.5 times the maximum of the first values and the 98th
    percentile.
    """
    shown = [known for points in curves if (known := drawable(points))]
    values = [value for known in shown for _, value in known]
    if not values:
        return None
    limit = _CEILING_FACTOR * max(*(known[0][1] for known in shown), float(np.percentile(values, 98)))
    return limit if 0 < limit < max(values) else None


def cut(points: Points, limit: float | None) -> list[tuple[int, float]]:
    """Clamp finite values to the limit."""
    return [(step, min(value, limit) if limit and can_draw(value) else value) for step, value in points]


def smoothing_window(num_points: int) -> int:
    """Return the number of steps to average: odd, about 5% of all steps, at most 501, and 1 below 40 steps."""
    return min(num_points // 20, 500) | 1


def smooth(points: Points) -> list[tuple[int, float]]:
    """Return the moving average of the values over the smoothing window. A value that cannot be drawn becomes NaN."""
    if not points:
        return []
    values = np.array([value if can_draw(value) else math.nan for _, value in points], dtype=float)
    means = moving_average(values, smoothing_window(len(points)))
    return [(step, mean) for (step, _), mean in zip(points, means.tolist(), strict=True)]


def moving_average(values: npt.NDArray[np.float64], window: int) -> npt.NDArray[np.float64]:
    """Average each finite value with its finite neighbours. Non-finite values become NaN.

    The window narrows to about a quarter at both ends, so that a curve starts and ends near the actual values.
    """
    known, half = np.isfinite(values), window // 2
    sums = np.convolve(np.where(known, values, 0.0), np.ones(window), mode="same")
    numbers = np.convolve(known.astype(float), np.ones(window), mode="same")
    means = np.where(known, sums / np.maximum(numbers, 1.0), math.nan)
    for index in (*range(half), *range(max(len(values) - half, half), len(values))):
        reach = max(min(index, len(values) - 1 - index), half // 4)
        near = values[max(index - reach, 0) : index + reach + 1]
        if known[index]:
            means[index] = near[np.isfinite(near)].mean()
    return means


# Axes: map a step or a value to a coordinate, with ticks at round numbers.


@dataclass(frozen=True)
class Axis:
    """Maps the values from `low` to `high` to the coordinates from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    ticks: Sequence[float] = ()
    is_log: bool = False
    """Whether `low` and `high` are logarithms. Values of 0 and below are then at the start."""

    def __call__(self, value: float) -> float:
        at = max(_log10(value), self.low) if self.is_log else value
        return self.start + (self.end - self.start) * (at - self.low) / (self.high - self.low)


def step_axis(steps: Sequence[int], start: float, end: float) -> Axis:
    """Return the axis of steps. A single step is in the middle."""
    low, high = min(steps), max(steps)
    if low == high:
        return Axis(low - 1, high + 1, start, end, [low])
    return Axis(low, high, start, end, _round_numbers(low, high, whole=True))


def value_axis(values: Sequence[float], start: float, end: float) -> Axis:
    """Return the axis of values: logarithmic if they span a large range."""
    if needs_log_scale(values):
        return _log_axis(values, start, end)
    low, high = min(values), max(values)
    padding = (high - low) * 0.06 or abs(high) * 0.5 or 1.0
    # Start at zero if that costs little space, so that heights can be compared by eye.
    low, high = 0.0 if 0 <= low < 0.4 * high else low - padding, high + padding
    return Axis(low, high, start, end, _round_numbers(low, high))


def needs_log_scale(values: Sequence[float]) -> bool:
    """Return whether a logarithmic scale is used, because the values span a large range."""
    positive = [value for value in values if value > 0]
    return bool(positive) and max(positive) / _LOG_RATIO >= min(positive)


def _log_axis(values: Sequence[float], start: float, end: float) -> Axis:
    logs = [_log10(value) for value in values if value > 0]
    low, high = min(logs) - 0.06, max(logs) + 0.06
    every = max(math.ceil((high - low) / 6), 1)
    parts = (1, 2, 5) if high - low < 1.6 else (1, 3) if high - low < 4 else (1,)
    powers = (power for power in range(math.floor(low), math.floor(high) + 1) if power % every == 0)
    ticks = [tick for power in powers for part in parts if low <= _log10(tick := part * 10.0**power) <= high]
    return Axis(low, high, start, end, ticks, is_log=True)


def _log10(value: float) -> float:
    return math.log10(value) if value > 0 else -math.inf


def _round_numbers(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Return about five round numbers between two values: multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    stride = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.99)
    stride = max(stride, 1.0) if whole else stride
    first = math.ceil(low / stride - 1e-9)
    return [number * stride for number in range(first, math.floor(high / stride + 1e-9) + 1)]


# The SVG backend.

WIDTH, HEIGHT = 900, 400
"""The size of the plot in a file."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 18, 10, 40
_HEADER_HEIGHT, _LINE_HEIGHT, _KEY_WIDTH = 64, 22, 34
_CHAR_WIDTH = 6.6
"""Mean width of a character at 12 px, rounded up so that legend entries do not touch."""
_NO_POINTS = f'<text class="middle" x="{WIDTH / 2:g}" y="{HEIGHT / 2:g}">no finite loss</text>'
_STYLE = """<style>
text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue","Noto Sans",Arial,sans-serif}
text{fill:#575e66;font-size:12px}
.heading{fill:#1d2125;font-size:17px;font-weight:600}.remark{fill:#9c1f1c}
.end{text-anchor:end}.middle{text-anchor:middle}
.paper{fill:#fff}.grid{stroke:#e6e6e0;fill:none}.frame{stroke:#575e66;fill:none}
.line,.raw,.smooth,.evaluation{fill:none;stroke-linejoin:round;stroke-linecap:round}
.raw{stroke:#a9c2de;stroke-width:1.1}.smooth{stroke:#1b5a9e;stroke-width:2.2}
.evaluation{stroke:#b8480f;stroke-width:1.4;stroke-dasharray:4 4}
.dot{fill:#b8480f}.ring{fill:none;stroke:#b8480f;stroke-width:1.8}.gap{stroke:#9c1f1c;stroke-width:1.8;fill:none}
</style>"""
_DOCUMENT = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{name}" width="{width}" \
height="{height}">
<desc>{description}</desc>
{style}
<rect class="paper" width="{width}" height="{height}" fill="#fff"/>
<text class="heading" x="16" y="30">{name}</text>
<text x="16" y="52">{subtitle}</text>
<g transform="translate(0 {header_height})">
{shapes}
</g>
{below}</svg>
"""


class SvgPlot:
    """The shapes of a picture of `width` by `height`, drawn over axes that include some points."""

    def __init__(self, points: Points, width: int, height: int) -> None:
        self._left, self._right, self.bottom = _LEFT, width - _RIGHT, height - _BOTTOM
        self.x = step_axis([step for step, _ in points], self._left, self._right)
        self.y = value_axis([value for _, value in drawable(points)], self.bottom, _TOP)
        self.shapes: list[str] = []
        for tick in self.y.ticks:
            at = round(self.y(tick), 1)
            self.shapes.append(f'<path class="grid" d="M{_LEFT} {at:g}H{self._right}" stroke="#e6e6e0" fill="none"/>')
            self.shapes.append(f'<text class="tick end" x="{_LEFT - 7}" y="{at + 4:g}">{tick:,.6g}</text>')
        frame = f"M{_LEFT} {self.bottom}H{self._right}"
        for tick in self.x.ticks:
            at = round(self.x(tick), 1)
            frame += f"M{at:g} {self.bottom}v4"
            label = count(round(tick))
            self.shapes.append(f'<text class="tick middle" x="{at:g}" y="{self.bottom + 17}">{label}</text>')
        self.shapes.append(f'<path class="frame" d="{frame}" stroke="#575e66" fill="none"/>')
        title = f'<text class="tick end" x="{self._right}" y="{self.bottom + 34}">optimizer step</text>'
        self.shapes.append(title)

    def place(self, point: tuple[int, float]) -> tuple[float, float]:
        """Return the coordinates of a point, in tenths."""
        return round(self.x(point[0]), 1), round(self.y(point[1]), 1)

    def draw_line(self, points: Points, style: str) -> None:
        """Draw a line through the extremes of each unit of width, with gaps at points that cannot be drawn."""
        columns: dict[int, list[tuple[int, float]]] = {}
        for point in points:
            columns.setdefault(round(self.x(point[0])), []).append(point)
        parts: list[list[tuple[float, float]]] = [[]]
        for column in columns.values():
            known = drawable(column)
            ends = sorted({min(known, key=by_value), max(known, key=by_value)}) if len(known) > 2 else known
            parts[-1] += map(self.place, ends)
            if len(known) < len(column):
                parts.append([])
        if path := "".join(map(_stroke, filter(None, parts))):
            self.shapes.append(f'<path {style} d="{path}"/>')


def _stroke(line: Sequence[tuple[float, float]]) -> str:
    first, *rest = (f"{across:g} {down:g}" for across, down in line)
    # A single point has no line; a small circle is drawn instead.
    circle = "m-1.5 0a1.5 1.5 0 1 0 3 0a1.5 1.5 0 1 0-3 0"
    return f"M{first}{''.join(f'L{point}' for point in rest) or circle}"


def svg_document(
    title: str,
    shapes: str,
    *,
    subtitle: str,
    description: str,
    legend: Sequence[tuple[str, str]],
    remarks: Sequence[str] = (),
) -> str:
    """Return a plot as an SVG document with its legend and its remarks."""
    x, y, below = _LEFT, _HEADER_HEIGHT + HEIGHT + 10, ""
    for key, text in legend:
        width = round(_KEY_WIDTH + _CHAR_WIDTH * len(text) + 24)
        if x + width > WIDTH and x > _LEFT:
            x, y = _LEFT, y + _LINE_HEIGHT
        words = f'<text x="{_KEY_WIDTH}" y="11">{escape_text(text)}</text>'
        below += f'<g transform="translate({x} {y})">{key}{words}</g>\n'
        x += width
    for remark in remarks:
        y += _LINE_HEIGHT
        below += f'<text class="remark" x="{_LEFT}" y="{y + 11}">{escape_text(remark)}</text>\n'
    height = y + _LINE_HEIGHT + 12
    return _DOCUMENT.format(
        width=WIDTH,
        height=height,
        name=escape_text(title),
        description=escape_text(description),
        style=_STYLE,
        subtitle=escape_text(subtitle),
        header_height=_HEADER_HEIGHT,
        shapes=shapes or _NO_POINTS,
        below=below,
    )


def escape_text(text: str) -> str:
    """Escape a text for XML, which does not allow control characters and lone surrogates: a folder's name may."""
    return escape("".join(character if character.isprintable() else "?" for character in text))


# The backend for the terminal.

_BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bit of each dot in a braille character, by row and column."""
_LABELLED_ROWS = 3
_BLOCKS = "▁▂▃▄▅▆▇█"


class TextPlot:
    """A plot of `width` by `height` characters: a grid of dots, several per character, below marks of one character.

    2.41 ┤⢇
         │ ⠑⢄⡀    o
    1.50 ┤   ⠈⠉⠒⠤⠤⢄⣀⣀ *
         └──────────────
          1           95
    """

    def __init__(self, points: Points, width: int, height: int, *, is_ascii: bool) -> None:
        """Set the axes so that they include all points. At least one value must be finite."""
        self._width, self._height, self._is_ascii = width, height, is_ascii
        self._across, self._down = (1, 2) if is_ascii else (2, 4)  # dots per character
        steps, values = [step for step, _ in points], [value for _, value in drawable(points)]
        low, high = min(values), max(values)
        if high - low <= 1e-9 * max(abs(high), 1e-9):
            middle, half = (low + high) / 2, max(abs(high) * 0.05, 1e-3)
            low, high = middle - half, middle + half
        self._x = Axis(min(steps), max(steps) if len({*steps}) > 1 else steps[0] + 1, 0, width * self._across - 1)
        self._y = Axis(low, high, height * self._down - 1, 0)
        self._last = max(steps)
        self._dots: set[tuple[int, int]] = set()
        self._marks: dict[tuple[int, int], str] = {}

    def _dot(self, point: tuple[int, float]) -> tuple[int, int]:
        return round(self._x(point[0])), round(self._y(point[1]))

    def draw_line(self, points: Points) -> None:
        """Draw a line through the points, with a gap at each value that is not finite."""
        before: tuple[int, int] | None = None
        for point in points:
            here = self._dot(point) if math.isfinite(point[1]) else None
            if here is not None:
                (x, y), (right, down) = before or here, here
                length = max(abs(right - x), abs(down - y), 1)
                for at in range(length + 1):
                    self._dots.add((round(x + at / length * (right - x)), round(y + at / length * (down - y))))
            before = here

    def draw_marks(self, points: Points, mark: str = "o", best: str = "*") -> None:
        """Mark each point, and the lowest one with `best`."""
        lowest = min(points, key=by_value, default=None)
        for point in (*points, *([lowest] if lowest else [])):
            across, down = self._dot(point)
            self._marks[across // self._across, down // self._down] = best if point == lowest else mark

    def rows(self) -> list[str]:
        """Return the grid as lines of text, with labels on both axes."""
        labels = self._value_labels()
        margin = max(map(len, labels.values()))
        side, tick, corner, floor = ("|", "+", "+", "-") if self._is_ascii else ("│", "┤", "└", "─")
        lines: list[str] = []
        for row in range(self._height):
            cells = "".join(self._character(column, row) for column in range(self._width))
            lines.append(f"{labels.get(row, ''):>{margin}} {tick if row in labels else side}{cells}".rstrip())
        return [*lines, " " * margin + f" {corner}" + floor * self._width, " " * (margin + 2) + self._step_labels()]

    def _character(self, column: int, row: int) -> str:
        if (column, row) in self._marks:
            return self._marks[column, row]
        if self._is_ascii:
            upper, lower = ((column, 2 * row + half) in self._dots for half in range(2))
            return ":" if upper and lower else "'" if upper else "." if lower else " "
        bits = sum(
            bit
            for down, pair in enumerate(_BRAILLE)
            for across, bit in enumerate(pair)
            if (2 * column + across, 4 * row + down) in self._dots
        )
        return chr(0x2800 + bits) if bits else " "

    def _value_labels(self) -> dict[int, str]:
        low, high = self._y.low, self._y.high
        digits = min(max(2 - math.floor(math.log10(high - low)), 0), 6)
        rows = {round(number * (self._height - 1) / _LABELLED_ROWS) for number in range(_LABELLED_ROWS + 1)}
        return {row: f"{high - (high - low) * row / max(self._height - 1, 1):,.{digits}f}" for row in sorted(rows)}

    def _step_labels(self) -> str:
        first, last = round(self._x.low), self._last
        left, middle, right = count(first), count((first + last) // 2), count(last)
        if first == last:
            return f"step {left}"
        spare = self._width - len(left) - len(right)
        if spare < len(middle) + 4 or middle in (left, right):
            return f"{left}{' ' * max(spare, 1)}{right} step"
        return f"{left}{middle:^{spare}}{right} step"


# Rows of bars or intervals on one axis. `bar_chart` in `pages/shared.html` draws them for a page.

_SHADES = "█▒░"
ASCII = str.maketrans("│█▒░●◆├─┤→", "|#=.o*|-|>")
"""What replaces the characters of a chart where stdout is not UTF-8."""


@dataclass(frozen=True)
class BarRow:
    """One row: a bar of several parts, a dot in its interval, or a text."""

    label: str
    texts: Sequence[str]
    """The numbers beside the bar."""
    parts: Sequence[float] = ()
    interval: tuple[float, float, float] | None = None
    """Low end, value and high end."""
    text: str = ""
    is_marked: bool = False


@dataclass(frozen=True)
class BarChart:
    """Rows of bars on one axis from 0 to `high`."""

    title: str
    heads: Sequence[str]
    """The headings of the numbers."""
    rows: Sequence[BarRow]
    high: float
    legend: Mapping[int, str] = field(default_factory=dict[int, str])
    """The names of the parts of a bar by their shade: 0 dark, 1 middle, 2 light."""
    ticks: Sequence[tuple[float, str]] = ()
    """Values with a line and a label. One above `high` has no line."""
    marked: str = ""
    """What a marked row is."""

    def spans(self, row: BarRow) -> list[tuple[int, float, float]]:
        """Return the shade, the start and the end of each part of a bar."""
        ends = [0.0, *accumulate(row.parts)]
        return list(zip(self.legend, ends, ends[1:], strict=False))

    def text(self, width: int) -> list[str]:
        """Return the bars as lines of `width` characters; with ticks, also the line of their labels."""
        axis = Axis(0, self.high, 0, width - 1)
        lines = [self._cells(row, axis) for row in self.rows]
        if self.ticks:
            lines.append([" "] * width)
        for value, label in self.ticks:
            at = min(max(round(axis(value)) - len(label) // 2, 0), width - len(label))
            lines[-1][at : at + len(label)] = label
        return ["".join(cells).rstrip() for cells in lines]

    def _cells(self, row: BarRow, axis: Axis) -> list[str]:
        cells = [*f"│ {row.text}".ljust(round(axis.end) + 1)]
        for shade, start, end in self.spans(row):
            # A bar that is not empty has at least one character.
            begin, stop = (math.ceil(axis(value) - 1e-9) for value in (start, end))
            cells[begin + 1 : stop + 1] = _SHADES[shade] * (stop - begin)
        for value, _ in self.ticks:
            if value <= self.high:
                cells[round(axis(value))] = "│"
        if row.interval:
            low, value, high = map(round, map(axis, row.interval))
            cells[low : high + 1] = "─" * (high - low + 1)
            cells[low], cells[high] = "├┤"
            cells[value] = "●◆"[row.is_marked]
        return cells

    @property
    def text_legend(self) -> str:
        """The meaning of the shades and of the mark."""
        names = [f"{_SHADES[shade]} {name}" for shade, name in self.legend.items()]
        return ", ".join([*names, *([f"◆ {self.marked}"] if any(row.is_marked for row in self.rows) else [])])


def sparkline(values: list[float], width: int) -> str:
    """Draw the last values as blocks of eight heights. A non-finite value is an `x`."""
    shown = values[-width:] if width > 0 else []
    known = [value for value in shown if math.isfinite(value)]
    low, high = min(known, default=0.0), max(known, default=0.0)

    def block(value: float) -> str:
        if not math.isfinite(value):
            return "x"
        share = 0.5 if high == low else (value - low) / (high - low)
        return _BLOCKS[min(int(share * len(_BLOCKS)), len(_BLOCKS) - 1)]

    return "".join(map(block, shown))
