"""Draw the loss curve of a run as SVG, for `loss.svg` and the report page, and smooth it for every display."""

import math
from collections.abc import Callable, Sequence
from html import escape
from operator import itemgetter
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tunewell.core.files import write_atomic
from tunewell.core.units import count
from tunewell.records.report import Curve

Points = Sequence[tuple[int, float]]
"""(step, loss) pairs in order of steps. A loss may be NaN or infinite."""

MARGIN_LEFT, MARGIN_RIGHT, MARGIN_TOP, MARGIN_BOTTOM = 52.0, 18.0, 10.0, 40.0
LOG_RATIO = 20.0
"""From this ratio of highest to lowest loss, a log scale is used. A linear one would show only the first steps."""
_CEILING_FACTOR = 1.5
_LARGEST = 1e100
"""Larger losses, far beyond fp32, are not drawn, because sums of them could overflow."""


# Smoothing and clipping, shared by the terminal, `loss.svg` and the report page.


def smoothing_window(num_points: int) -> int:
    """Return the number of steps to average: odd, about 5% of all steps, at most 501, and 1 below 40 steps."""
    return min(num_points // 20, 500) | 1


def smooth(points: Points) -> list[tuple[int, float]]:
    """Return the moving average of the losses over the smoothing window. A non-finite loss becomes NaN.

    The window narrows to about a quarter at both ends, so that the curve starts and ends near the actual losses.
    """
    if not points:
        return []
    window = smoothing_window(len(points))
    values = np.array([value if can_draw(value) else math.nan for _, value in points], dtype=float)
    means = moving_average(values, window)
    return [(step, mean) for (step, _), mean in zip(points, means.tolist(), strict=True)]


def moving_average(values: npt.NDArray[np.float64], window: int) -> npt.NDArray[np.float64]:
    """Average each finite value with its finite neighbours. Non-finite values become NaN."""
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


def can_draw(value: float) -> bool:
    """Return whether a loss is finite and small enough to be drawn."""
    return math.isfinite(value) and abs(value) < _LARGEST


def drawable(points: Points) -> list[tuple[int, float]]:
    """Return the points whose loss can be drawn."""
    return [(step, value) for step, value in points if can_draw(value)]


def ceiling(train: Points, held_out: Points) -> float | None:
    """Return the loss at which a curve is clipped, or None if no loss is high enough to be clipped.

    A single spike must not flatten the rest, so the limit is 1.5 times the maximum of the first losses and the 98th
    percentile.
    """
    curves = [known for points in (train, held_out) if (known := drawable(points))]
    if not curves:
        return None
    values = [value for known in curves for _, value in known]
    limit = _CEILING_FACTOR * max(*(known[0][1] for known in curves), float(np.percentile(values, 98)))
    return limit if 0 < limit < max(values) else None


def cut(points: Points, limit: float | None) -> list[tuple[int, float]]:
    """Clamp finite losses to the limit."""
    return [(step, min(value, limit) if limit and can_draw(value) else value) for step, value in points]


def format_loss(value: float) -> str:
    """Format a loss with four decimals, or in words if it is not finite."""
    if math.isnan(value):
        return "not a number"
    if not math.isfinite(value):
        return "infinite" if value > 0 else "minus infinite"
    return f"{value:,.4f}" if abs(value) < 1e6 else f"{value:.3e}"


# Axes: map a step or a loss to a coordinate, with ticks at round numbers.

_Axis = tuple[Callable[[float], float], list[float]]
"""A function from a value to its coordinate, and the values of the ticks."""


def _linear(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: start + (end - start) * (value - low) / (high - low)


def step_axis(steps: list[int], left: float, right: float) -> _Axis:
    """Map steps from left to right. A single step is in the middle."""
    low, high = min(steps), max(steps)
    if low == high:
        return lambda _: (left + right) / 2, [low]
    return _linear(low, high, left, right), _round_numbers(low, high, whole=True)


def linear_axis(values: list[float], bottom: float, top: float) -> _Axis:
    """Map losses to heights on a linear scale."""
    low, high = min(values), max(values)
    padding = (high - low) * 0.06 or abs(high) * 0.5 or 1.0
    # Start at zero if that costs little space, so that heights can be compared by eye.
    low, high = 0.0 if 0 <= low < 0.4 * high else low - padding, high + padding
    return _linear(low, high, bottom, top), _round_numbers(low, high)


def log_axis(values: list[float], bottom: float, top: float) -> _Axis:
    """Map losses to heights on a log scale. Losses of 0 and below are at the bottom."""
    logs = [_log10(value) for value in values if value > 0]
    low, high = min(logs) - 0.06, max(logs) + 0.06
    every = max(math.ceil((high - low) / 6), 1)
    parts = (1, 2, 5) if high - low < 1.6 else (1, 3) if high - low < 4 else (1,)
    powers = (power for power in range(math.floor(low), math.floor(high) + 1) if power % every == 0)
    ticks = [tick for power in powers for part in parts if low <= _log10(tick := part * 10.0**power) <= high]
    height = _linear(low, high, bottom, top)
    return lambda value: height(max(_log10(value), low)), ticks


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


def needs_log_scale(points: Points) -> bool:
    """Return whether a logarithmic scale is used, because the losses span a large range."""
    positive = [value for _, value in points if value > 0]
    return bool(positive) and max(positive) / LOG_RATIO >= min(positive)


def draw_axes(
    points: Points, width: int, height: int
) -> tuple[Callable[[float], float], Callable[[float], float], list[str]]:
    """Return the functions from a step and a loss to their coordinates, and both axes as SVG elements.

    Where no CSS class sets the colours, the attributes do.
    """
    left, right, bottom = MARGIN_LEFT, width - MARGIN_RIGHT, height - MARGIN_BOTTOM
    known = drawable(points)
    x, x_ticks = step_axis([step for step, _ in points], left, right)
    axis = log_axis if needs_log_scale(known) else linear_axis
    y, y_ticks = axis([value for _, value in known], bottom, MARGIN_TOP)
    parts = [
        f'<path class="grid" d="M{left:g} {at:g}H{right:g}" stroke="#e6e6e0" fill="none"/>'
        f'<text class="tick end" x="{left - 7:g}" y="{at + 4:g}">{tick:,.6g}</text>'
        for at, tick in ((tenth(y(tick)), tick) for tick in y_ticks)
    ]
    frame = f"M{left:g} {bottom:g}H{right:g}"
    for tick in x_ticks:
        at = tenth(x(tick))
        frame += f"M{at:g} {bottom:g}v4"
        parts.append(f'<text class="tick middle" x="{at:g}" y="{bottom + 17:g}">{count(round(tick))}</text>')
    parts.append(f'<path class="frame" d="{frame}" stroke="#575e66" fill="none"/>')
    parts.append(f'<text class="tick end" x="{right:g}" y="{bottom + 34:g}">optimizer step</text>')
    return x, y, parts


class LossPlot:
    """The SVG shapes, legend and texts of a loss curve, sorted by step and clipped at its ceiling."""

    def __init__(self, curve: Curve) -> None:
        self._train, self._held_out = (sorted(points, key=_first) for points in (curve.train, curve.held_out))
        self._limit = ceiling(self._train, self._held_out)
        self._known = drawable((*self._train, *self._held_out))
        evaluations = drawable(self._held_out)
        named = [point for point in evaluations if point[0] == curve.best_step]
        self._best = best = min(named or evaluations, key=_second, default=None)
        self._best_text = f"{format_loss(best[1])} at step {count(best[0])}" if best else ""
        self._window = smoothing_window(len(self._train))
        self.is_log = needs_log_scale(cut(self._known, self._limit))

    @property
    def description(self) -> str:
        """A description of the curve for screen readers."""
        parts = [_describe("Training loss", self._train), _describe("Held-out loss", self._held_out)]
        parts.append(f"The best held-out loss is {self._best_text}." if self._best_text else "")
        return " ".join(part for part in parts if part)

    @property
    def remarks(self) -> list[str]:
        """Remarks about losses that the curve cannot show: non-finite, clipped or zero."""
        remarks = []
        for name, points in (("training loss", self._train), ("held-out loss", self._held_out)):
            if bad := [step for step, value in points if not can_draw(value)]:
                shown = ", ".join(count(step) for step in bad[:5]) + (", ..." if len(bad) > 5 else "")
                steps = f"{count(len(bad), 'step')} ({'step' if len(bad) == 1 else 'steps'} {shown})"
                remarks.append(f"The {name} was not finite at {steps}: a gap in the line.")
        if self._limit is not None:
            step, highest = max(self._known, key=_second)
            at = f"{highest:.3g} at step {count(step)}"
            remarks.append(f"The curve is cut at {self._limit:.3g}: the highest loss is {at}.")
        if self.is_log and (below := sum(value <= 0 for _, value in self._known)):
            remarks.append(f"{count(below, 'loss', 'losses')} of 0 drawn at the lower edge: a log scale has no 0.")
        return remarks

    @property
    def legend(self) -> list[tuple[str, str]]:
        """The legend entries: an SVG symbol of 26 by 14 units, and its text."""
        raw, strong = '<path class="raw" d="M2 7H24"/>', '<path class="smooth" d="M2 7H24"/>'
        dot, ring = '<circle class="dot" cx="13" cy="7" r="3"/>', '<circle class="ring" cx="13" cy="7" r="5.8"/>'
        entries = []
        if drawable(self._train):
            entries.append((raw if self._window > 1 else strong, "training, each step"))
            if self._window > 1:
                entries.append((strong, f"training, mean of {self._window} steps"))
        if self._best:
            entries.append((f'<path class="evaluation" d="M2 7H24"/>{dot}', "held-out"))
            entries.append((f"{dot}{ring}", f"best held-out, {self._best_text}"))
        if len(self._known) < len(self._train) + len(self._held_out):
            entries.append(('<path class="gap" d="M13 2V12"/>', "not finite"))
        return entries

    def shapes(self, width: int, height: int) -> str:
        """Return axes, lines and points as SVG elements, or "" if no loss is finite. CSS classes set the colours."""
        if not self._known:
            return ""
        train, held_out = cut(self._train, self._limit), cut(self._held_out, self._limit)
        x, y, parts = draw_axes([*train, *held_out], width, height)
        gaps = sorted({float(round(x(step))) for step, value in (*train, *held_out) if not can_draw(value)})
        parts += [f'<path class="gap" d="M{at:g} {height - MARGIN_BOTTOM:g}v-10"/>' for at in gaps]
        smoothed = path_through(smooth(train), x, y) if self._window > 1 else ""
        lines = [("raw" if smoothed else "smooth", path_through(train, x, y)), ("smooth", smoothed)]
        lines.append(("evaluation", path_through(held_out, x, y)))
        parts += [f'<path class="{name}" d="{path}"/>' for name, path in lines if path]
        dots = [(tenth(x(step)), tenth(y(value))) for step, value in drawable(held_out)]
        # At most one dot per three units of width, so that many evaluations do not overlap.
        dots = {round(across / 3): (across, down) for across, down in dots}.values()
        parts += [f'<circle class="dot" cx="{across:g}" cy="{down:g}" r="3.6"/>' for across, down in dots]
        for step, value in cut([self._best] if self._best else [], self._limit):
            parts.append(f'<circle class="ring" cx="{tenth(x(step)):g}" cy="{tenth(y(value)):g}" r="8"/>')
        return "\n".join(parts)


def _describe(name: str, points: Points) -> str:
    known = drawable(points)
    if not known:
        return ""
    (first, began), (last, ended) = known[0], known[-1]
    if first == last:
        return f"{name} {format_loss(began)} at step {count(first)}."
    return f"{name} from {format_loss(began)} at step {count(first)} to {format_loss(ended)} at step {count(last)}."


def path_through(points: Points, x: Callable[[float], float], y: Callable[[float], float]) -> str:
    """Return an SVG path through the extremes of each unit of width, with gaps at non-finite points."""
    columns: dict[int, list[tuple[float, float]]] = {}
    for step, value in points:
        columns.setdefault(round(x(step)), []).append((x(step), value))
    lines: list[list[tuple[float, float]]] = [[]]
    for column in columns.values():
        known = [(across, y(value)) for across, value in column if can_draw(value)]
        lines[-1] += sorted({min(known, key=_second), max(known, key=_second)}) if len(known) > 2 else known
        if len(known) < len(column):
            lines.append([])
    return "".join(_stroke(line) for line in lines if line)


def _stroke(line: list[tuple[float, float]]) -> str:
    # A single point has no line; a small circle is drawn instead.
    circle = "m-1.5 0a1.5 1.5 0 1 0 3 0a1.5 1.5 0 1 0-3 0"
    first, *rest = (f"{tenth(across):g} {tenth(down):g}" for across, down in line)
    return f"M{first}{''.join(f'L{point}' for point in rest) or circle}"


def escape_text(text: str) -> str:
    """Escape a text for XML, which does not allow control characters and lone surrogates: a folder's name may."""
    return escape("".join(character if character.isprintable() else "?" for character in text))


def tenth(value: float) -> float:
    return round(value, 1)


_first, _second = itemgetter(0), itemgetter(1)


# The SVG file around a plot.

_STYLE = """
text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue","Noto Sans",Arial,sans-serif}
text{fill:#575e66;font-size:12px}
.heading{fill:#1d2125;font-size:17px;font-weight:600}.remark{fill:#9c1f1c}
.end{text-anchor:end}.middle{text-anchor:middle}
.paper{fill:#fff}.grid{stroke:#e6e6e0;fill:none}.frame{stroke:#575e66;fill:none}
.raw,.smooth,.evaluation{fill:none;stroke-linejoin:round;stroke-linecap:round}
.raw{stroke:#a9c2de;stroke-width:1.1}.smooth{stroke:#1b5a9e;stroke-width:2.2}
.evaluation{stroke:#b8480f;stroke-width:1.4;stroke-dasharray:4 4}
.dot{fill:#b8480f}.ring{fill:none;stroke:#b8480f;stroke-width:1.8}.gap{stroke:#9c1f1c;stroke-width:1.8;fill:none}
"""
_SVG_WIDTH, _PLOT_HEIGHT = 900, 400
_HEADER_HEIGHT, _LINE_HEIGHT = 64, 22
_CHAR_WIDTH = 6.6
"""Mean width of a character at 12 px, rounded up so that legend entries do not touch."""
_DOCUMENT = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" \
viewBox="0 0 {width} {height}" role="img" aria-labelledby="title description">
<title id="title">{name}: loss over the steps of training</title>
<desc id="description">{description}</desc>
<style>{style}</style>
<rect class="paper" width="{width}" height="{height}"/>
<text class="heading" x="16" y="30">{name}</text>
<text x="16" y="52">loss per supervised token{scale}</text>
<g transform="translate(0 {header_height})">
{shapes}
</g>
{below}</svg>
"""


def write_loss_svg(path: Path, curve: Curve, *, title: str) -> None:
    """Write the curve to an SVG file, atomically."""
    write_atomic(path, loss_svg(curve, title=title))


def loss_svg(curve: Curve, *, title: str) -> str:
    """Return the curve as a complete SVG document with axes, legend and remarks."""
    plot = LossPlot(curve)
    none = f'<text class="middle" x="{_SVG_WIDTH / 2:g}" y="{_PLOT_HEIGHT / 2:g}">no finite loss</text>'
    below, height = _below_plot(plot)
    return _DOCUMENT.format(
        width=_SVG_WIDTH,
        height=height,
        name=escape_text(title),
        description=plot.description,
        style=_STYLE,
        scale=", logarithmic scale" if plot.is_log else "",
        header_height=_HEADER_HEIGHT,
        shapes=plot.shapes(_SVG_WIDTH, _PLOT_HEIGHT) or none,
        below="".join(f"{part}\n" for part in below),
    )


def _below_plot(plot: LossPlot) -> tuple[list[str], int]:
    """Return the wrapped legend and the remarks as SVG, and the height of the whole picture."""
    x, y, parts = MARGIN_LEFT, _HEADER_HEIGHT + _PLOT_HEIGHT + 10.0, []
    for key, text in plot.legend:
        width = 34 + _CHAR_WIDTH * len(text) + 24
        if x + width > _SVG_WIDTH and x > MARGIN_LEFT:
            x, y = MARGIN_LEFT, y + _LINE_HEIGHT
        parts.append(f'<g transform="translate({x:g} {y:g})">{key}<text x="34" y="11">{text}</text></g>')
        x += width
    for remark in plot.remarks:
        y += _LINE_HEIGHT
        parts.append(f'<text class="remark" x="{MARGIN_LEFT:g}" y="{y + 11:g}">{remark}</text>')
    return parts, round(y + _LINE_HEIGHT + 12)
