"""Draw the loss curve of a run as SVG, for `loss.svg` and for the report page; smooth it for every display."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tunewell.core.files import write_atomic
from tunewell.core.units import count
from tunewell.records.report import Curve

Points = Sequence[tuple[int, float]]
"""(step, loss) in the order of the steps; a loss may be nan or infinite."""

_MARGIN_LEFT, _MARGIN_RIGHT, _MARGIN_TOP, _MARGIN_BOTTOM = 52.0, 18.0, 10.0, 40.0
_LOG_RATIO = 20.0
"""Highest over lowest loss from which a logarithmic scale is used: a linear one would show only the first steps."""
_CEILING_FACTOR = 1.5
_LARGEST = 1e100
"""Far beyond fp32; the sum of a few such values would overflow."""


# Smoothing and cutting, shared by the terminal, `loss.svg` and the report page.


def smoothing_window(num_points: int) -> int:
    """Return the number of steps to average over: about a twentieth of all, odd, at most 501; 1 below 40 steps."""
    return min(num_points // 20, 500) | 1


def smooth(points: Points) -> list[tuple[int, float]]:
    """Average each loss with its neighbours inside the smoothing window; a loss that is not finite becomes nan.

    Towards both ends the window narrows to about a quarter, so that the curve begins and ends where the losses do.
    """
    if not points:
        return []
    window = smoothing_window(len(points))
    values = np.array([value if can_draw(value) else math.nan for _, value in points], dtype=float)
    means = moving_average(values, window)
    return [(step, mean) for (step, _), mean in zip(points, means.tolist(), strict=True)]


def moving_average(values: npt.NDArray[np.float64], window: int) -> npt.NDArray[np.float64]:
    """Average each finite value with its finite neighbours; values that are not finite become nan."""
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
    """Return the loss at which a curve is cut, or None if nothing is high enough to be cut.

    One spike must not flatten the rest: the limit is 1.5 times the highest of the first values and the 98th percentile.
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
    """Format a loss with four decimals; a value that is not finite in words."""
    if math.isnan(value):
        return "not a number"
    if not math.isfinite(value):
        return "infinite" if value > 0 else "minus infinite"
    return f"{value:,.4f}" if abs(value) < 1e6 else f"{value:.3e}"


# Scales: from a step or a loss to a coordinate, with ticks at round numbers.


@dataclass(frozen=True)
class Scale:
    """Map numbers to coordinates; `ticks` are coordinates with their labels."""

    at: Callable[[float], float]
    ticks: list[tuple[float, str]]


def step_scale(steps: list[int], *, left: float, right: float) -> Scale:
    """Map steps from left to right; a single step is in the middle."""
    low, high = min(steps), max(steps)
    if low == high:
        return Scale(lambda _: (left + right) / 2, [((left + right) / 2, count(low))])

    def at(step: float) -> float:
        return left + (right - left) * (step - low) / (high - low)

    return Scale(at, [(round(at(tick), 1), count(round(tick))) for tick in _round_numbers(low, high, whole=True)])


def linear_scale(values: list[float], *, top: float, bottom: float) -> Scale:
    """Map losses from the bottom up; equal differences have equal heights."""
    low, high = min(values), max(values)
    padding = (high - low) * 0.06 or abs(high) * 0.5 or 1.0
    # Start at zero where that costs little space: heights can then be compared by eye.
    low, high = 0.0 if 0 <= low < 0.4 * high else low - padding, high + padding

    def at(value: float) -> float:
        return bottom - (bottom - top) * (value - low) / (high - low)

    return Scale(at, [(round(at(tick), 1), f"{tick:,.6g}") for tick in _round_numbers(low, high)])


def log_scale(values: list[float], *, top: float, bottom: float) -> Scale:
    """Map losses from the bottom up; equal ratios have equal heights. Losses of 0 and below are at the bottom."""
    positive = [value for value in values if value > 0]
    low, high = math.log10(min(positive)) - 0.06, math.log10(max(positive)) + 0.06

    def at(value: float) -> float:
        height = math.log10(value) if value > 0 else low
        return bottom - (bottom - top) * (max(height, low) - low) / (high - low)

    every = max(math.ceil((high - low) / 6), 1)
    parts = (1, 2, 5) if high - low < 1.6 else (1, 3) if high - low < 4 else (1,)
    powers = (power for power in range(math.floor(low), math.floor(high) + 1) if power % every == 0)
    ticks = [tick for power in powers for part in parts if low <= _log10(tick := part * 10.0**power) <= high]
    return Scale(at, [(round(at(tick), 1), f"{tick:,.6g}") for tick in ticks])


def _log10(value: float) -> float:
    return math.log10(value) if value > 0 else -math.inf


def _round_numbers(low: float, high: float, *, whole: bool = False) -> list[float]:
    """List the multiples of 1, 2 or 5 times a power of ten between two numbers, about five of them."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    stride = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.99)
    stride = max(stride, 1.0) if whole else stride
    first = math.ceil(low / stride - 1e-9)
    return [number * stride for number in range(first, math.floor(high / stride + 1e-9) + 1)]


# Layout: the lines, points and ticks of one picture.


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A curve laid out for one size; lengths are units of the SVG, y runs downwards."""

    width: int
    height: int
    left: float
    right: float
    top: float
    bottom: float
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    raw: str
    """The SVG path of every step, thinned to the lowest and highest of each unit of width."""
    smooth: str
    held_out: str
    dots: list[tuple[float, float]]
    best: tuple[float, float] | None
    gaps: list[float]
    """The x coordinates at which a loss is not finite."""


@dataclass(frozen=True, kw_only=True)
class Captions:
    """The texts beside a curve."""

    description: str
    """What the curve shows, for screen readers."""
    smooth: str
    best: str
    remarks: list[str]
    """What the curve cannot show."""


def draw_curve(curve: Curve, *, width: int, height: int) -> Picture | None:
    """Lay out a curve; return None if it has no finite loss."""
    train, held_out = _cut_lines(curve)
    known = [value for _, value in (*train, *held_out) if can_draw(value)]
    if not known:
        return None
    left, right, top, bottom = _MARGIN_LEFT, width - _MARGIN_RIGHT, _MARGIN_TOP, height - _MARGIN_BOTTOM
    x = step_scale([step for step, _ in (*train, *held_out)], left=left, right=right)
    y = (log_scale if is_log(curve) else linear_scale)(known, top=top, bottom=bottom)
    dots = [(_tenth(x.at(step)), _tenth(y.at(value))) for step, value in drawable(held_out)]
    best = best_evaluation(curve.model_copy(update={"held_out": held_out}))
    return Picture(
        width=width,
        height=height,
        left=left,
        right=right,
        top=top,
        bottom=bottom,
        x_ticks=x.ticks,
        y_ticks=y.ticks,
        raw=_path(train, x=x, y=y),
        smooth=_path(smooth(train), x=x, y=y) if smoothing_window(len(train)) > 1 else "",
        held_out=_path(held_out, x=x, y=y),
        dots=_thinned(dots),
        best=(_tenth(x.at(best[0])), _tenth(y.at(best[1]))) if best else None,
        gaps=sorted({float(round(x.at(step))) for step, value in (*train, *held_out) if not can_draw(value)}),
    )


def describe_curve(curve: Curve) -> Captions:
    """Return the texts beside a curve."""
    train, held_out, best = _by_step(curve.train), _by_step(curve.held_out), best_evaluation(curve)
    window = smoothing_window(len(train))
    parts = [_describe("Training loss", train), _describe("Held-out loss", held_out)]
    best_text = f"{format_loss(best[1])} at step {count(best[0])}" if best else ""
    if best_text:
        parts.append(f"The best held-out loss is {best_text}.")
    return Captions(
        description=" ".join(part for part in parts if part),
        smooth=f"mean of {window} steps" if window > 1 else "",
        best=best_text,
        remarks=_remarks(curve),
    )


def best_evaluation(curve: Curve) -> tuple[int, float] | None:
    """Return the held-out point of the best step, or the lowest if no step is named."""
    known = drawable(_by_step(curve.held_out))
    named = [point for point in known if point[0] == curve.best_step]
    return min(named or known, key=lambda point: point[1], default=None)


def is_log(curve: Curve) -> bool:
    """Return whether the losses span enough for a logarithmic scale."""
    train, held_out = _cut_lines(curve)
    positive = [value for _, value in drawable((*train, *held_out)) if value > 0]
    return bool(positive) and max(positive) / _LOG_RATIO >= min(positive)


def _cut_lines(curve: Curve) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    train, held_out = _by_step(curve.train), _by_step(curve.held_out)
    limit = ceiling(train, held_out)
    return cut(train, limit), cut(held_out, limit)


def _by_step(points: Points) -> list[tuple[int, float]]:
    return sorted(points, key=lambda point: point[0])


def _describe(name: str, points: Points) -> str:
    known = drawable(points)
    if not known:
        return ""
    (first, began), (last, ended) = known[0], known[-1]
    if first == last:
        return f"{name} {format_loss(began)} at step {count(first)}."
    return f"{name} from {format_loss(began)} at step {count(first)} to {format_loss(ended)} at step {count(last)}."


def _remarks(curve: Curve) -> list[str]:
    remarks = []
    for name, points in (("training loss", curve.train), ("held-out loss", curve.held_out)):
        bad = sorted(step for step, value in points if not can_draw(value))
        if bad:
            shown = ", ".join(count(step) for step in bad[:5]) + (", ..." if len(bad) > 5 else "")
            steps = "step" if len(bad) == 1 else "steps"
            remarks.append(
                f"The {name} was not finite at {count(len(bad), 'step')} ({steps} {shown}): a gap in the line."
            )
    limit = ceiling(_by_step(curve.train), _by_step(curve.held_out))
    if limit is not None:
        step, highest = max(drawable((*curve.train, *curve.held_out)), key=_height)
        remarks.append(f"The curve is cut at {limit:.3g}: the highest loss is {highest:.3g} at step {count(step)}.")
    if is_log(curve):
        below = sum(value <= 0 for _, value in drawable((*curve.train, *curve.held_out)))
        if below:
            remarks.append(f"{count(below, 'loss', 'losses')} of 0 drawn at the lower edge: a log scale has no 0.")
    return remarks


def _path(points: Points, *, x: Scale, y: Scale) -> str:
    """Return an SVG path through the points, one column of the picture at a time, broken where a loss is not finite."""
    columns: dict[int, list[tuple[float, float]]] = {}
    for step, value in points:
        columns.setdefault(round(x.at(step)), []).append((x.at(step), value))
    lines: list[list[tuple[float, float]]] = [[]]
    for column in columns.values():
        known = [(across, y.at(value)) for across, value in column if can_draw(value)]
        lines[-1] += sorted({min(known, key=_height), max(known, key=_height)}) if len(known) > 2 else known
        if len(known) < len(column):
            lines.append([])
    return "".join(_stroke(line) for line in lines if line)


def _height(point: tuple[float, float]) -> float:
    return point[1]


def _stroke(line: list[tuple[float, float]]) -> str:
    # A single point has no line; a small circle is drawn instead.
    circle = "m-1.5 0a1.5 1.5 0 1 0 3 0a1.5 1.5 0 1 0-3 0"
    rest = "".join(f"L{_tenth(across):g} {_tenth(down):g}" for across, down in line[1:]) or circle
    return f"M{_tenth(line[0][0]):g} {_tenth(line[0][1]):g}{rest}"


def _thinned(dots: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Keep one dot for each three units of width, so that a thousand evaluations do not overlap."""
    return list({round(across / 3): (across, down) for across, down in dots}.values())


def _tenth(value: float) -> float:
    return round(value, 1)


# SVG: the shapes of a picture, and a whole file around them.

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
"""Mean width of a character at 12 px, rounded up: legend entries must not touch."""


def svg_shapes(picture: Picture) -> str:
    """Return the axes, lines and points of a picture as SVG elements; classes give them their colours."""
    left, right, bottom = picture.left, picture.right, picture.bottom
    parts = [
        f'<path class="grid" d="M{left:g} {y:g}H{right:g}"/>'
        f'<text class="tick end" x="{left - 7:g}" y="{y + 4:g}">{label}</text>'
        for y, label in picture.y_ticks
    ]
    parts.append(f'<path class="frame" d="M{left:g} {bottom:g}H{right:g}"/>')
    parts += [
        f'<path class="frame" d="M{x:g} {bottom:g}v4"/>'
        f'<text class="tick middle" x="{x:g}" y="{bottom + 17:g}">{label}</text>'
        for x, label in picture.x_ticks
    ]
    parts.append(f'<text class="tick end" x="{right:g}" y="{bottom + 34:g}">optimizer step</text>')
    parts += [f'<path class="gap" d="M{x:g} {bottom:g}v-10"/>' for x in picture.gaps]
    if picture.raw:
        parts.append(f'<path class="{"raw" if picture.smooth else "smooth"}" d="{picture.raw}"/>')
    if picture.smooth:
        parts.append(f'<path class="smooth" d="{picture.smooth}"/>')
    if picture.held_out:
        parts.append(f'<path class="evaluation" d="{picture.held_out}"/>')
    parts += [f'<circle class="dot" cx="{x:g}" cy="{y:g}" r="3.6"/>' for x, y in picture.dots]
    if picture.best:
        parts.append(f'<circle class="ring" cx="{picture.best[0]:g}" cy="{picture.best[1]:g}" r="8"/>')
    return "\n".join(parts)


def legend(curve: Curve) -> list[tuple[str, str]]:
    """Return the legend entries of a curve: an SVG key of 26 by 14 units, and its text."""
    captions, entries = describe_curve(curve), []
    if drawable(curve.train):
        strong = '<path class="smooth" d="M2 7H24"/>'
        entries.append(('<path class="raw" d="M2 7H24"/>' if captions.smooth else strong, "training, each step"))
        if captions.smooth:
            entries.append((strong, f"training, {captions.smooth}"))
    if captions.best:
        dot, ring = '<circle class="dot" cx="13" cy="7" r="3"/>', '<circle class="ring" cx="13" cy="7" r="5.8"/>'
        entries.append((f'<path class="evaluation" d="M2 7H24"/>{dot}', "held-out"))
        entries.append((f"{dot}{ring}", f"best held-out, {captions.best}"))
    if any(not can_draw(value) for _, value in (*curve.train, *curve.held_out)):
        entries.append(('<path class="gap" d="M13 2V12"/>', "not finite"))
    return entries


def write_loss_svg(path: Path, curve: Curve, *, title: str) -> None:
    """Write the curve as a complete SVG file, atomically."""
    write_atomic(path, loss_svg(curve, title=title))


def loss_svg(curve: Curve, *, title: str) -> str:
    """Return the curve as a complete SVG document with axes, legend and remarks."""
    picture, captions = draw_curve(curve, width=_SVG_WIDTH, height=_PLOT_HEIGHT), describe_curve(curve)
    # XML allows neither control characters nor lone surrogates, which a folder name may hold.
    name = escape("".join(letter if letter.isprintable() else "?" for letter in title))
    axis = f"loss per supervised token{', logarithmic scale' if is_log(curve) else ''}"
    if picture is None:
        plot = f'<text class="middle" x="{_SVG_WIDTH / 2:g}" y="{_PLOT_HEIGHT / 2:g}">no finite loss</text>'
    else:
        plot = svg_shapes(picture)
    below, height = _below_plot(legend(curve), captions.remarks)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_SVG_WIDTH}" height="{height}" '
            f'viewBox="0 0 {_SVG_WIDTH} {height}" role="img" aria-labelledby="title description">',
            f'<title id="title">{name}: loss over the steps of training</title>',
            f'<desc id="description">{captions.description}</desc>',
            f"<style>{_STYLE}</style>",
            f'<rect class="paper" width="{_SVG_WIDTH}" height="{height}"/>',
            f'<text class="heading" x="16" y="30">{name}</text>',
            f'<text x="16" y="52">{axis}</text>',
            f'<g transform="translate(0 {_HEADER_HEIGHT})">',
            plot,
            "</g>",
            *below,
            "</svg>",
            "",
        ]
    )


def _below_plot(entries: list[tuple[str, str]], remarks: list[str]) -> tuple[list[str], int]:
    """Lay out the legend, wrapped, and the remarks; return them with the height of the whole picture."""
    x, y, parts = _MARGIN_LEFT, _HEADER_HEIGHT + _PLOT_HEIGHT + 10.0, []
    for key, text in entries:
        width = 34 + _CHAR_WIDTH * len(text) + 24
        if x + width > _SVG_WIDTH and x > _MARGIN_LEFT:
            x, y = _MARGIN_LEFT, y + _LINE_HEIGHT
        parts.append(f'<g transform="translate({x:g} {y:g})">{key}<text x="34" y="11">{text}</text></g>')
        x += width
    for remark in remarks:
        y += _LINE_HEIGHT
        parts.append(f'<text class="remark" x="{_MARGIN_LEFT:g}" y="{y + 11:g}">{remark}</text>')
    return parts, round(y + _LINE_HEIGHT + 12)
