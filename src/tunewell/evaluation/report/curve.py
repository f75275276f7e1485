"""The loss curve of a report as numbers to draw: lines, points and ticks in the units of an SVG picture."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tunewell.core.units import count
from tunewell.evaluation.report.view import loss
from tunewell.records.report import Curve

# The scales of a drawn curve: from a step or a loss to a place in the picture, with round numbers to write there.


@dataclass(frozen=True)
class Scale:
    """Where a number lies, and the ticks: places with their labels."""

    at: Callable[[float], float]
    ticks: list[tuple[float, str]]


def step_scale(steps: list[int], *, left: float, right: float) -> Scale:
    """Lay steps from left to right; a single one in the middle."""
    low, high = min(steps), max(steps)
    if low == high:
        return Scale(lambda _: (left + right) / 2, [((left + right) / 2, count(low))])

    def at(step: float) -> float:
        return left + (right - left) * (step - low) / (high - low)

    return Scale(at, [(round(at(tick), 1), count(round(tick))) for tick in _round_numbers(low, high, whole=True)])


def straight_scale(values: list[float], *, top: float, bottom: float) -> Scale:
    """Lay values from the bottom up, equal differences being equal heights."""
    low, high = min(values), max(values)
    room = (high - low) * 0.06 or abs(high) * 0.5 or 1.0
    # From zero where that costs little room: heights can then be compared by eye.
    low, high = 0.0 if 0 <= low < 0.4 * high else low - room, high + room

    def at(value: float) -> float:
        return bottom - (bottom - top) * (value - low) / (high - low)

    return Scale(at, [(round(at(tick), 1), f"{tick:,.6g}") for tick in _round_numbers(low, high)])


def log_scale(values: list[float], *, top: float, bottom: float) -> Scale:
    """Lay values from the bottom up, equal ratios being equal heights; what is not above zero lies at the bottom."""
    above = [value for value in values if value > 0]
    low, high = math.log10(min(above)) - 0.06, math.log10(max(above)) + 0.06

    def at(value: float) -> float:
        height = math.log10(value) if value > 0 else low
        return bottom - (bottom - top) * (max(height, low) - low) / (high - low)

    every = max(math.ceil((high - low) / 6), 1)
    parts = (1, 2, 5) if high - low < 1.6 else (1, 3) if high - low < 4 else (1,)
    powers = (power for power in range(math.floor(low), math.floor(high) + 1) if power % every == 0)
    ticks = [tick for power in powers for part in parts if low <= _log(tick := part * 10.0**power) <= high]
    return Scale(at, [(round(at(tick), 1), f"{tick:,.6g}") for tick in ticks])


def _log(value: float) -> float:
    return math.log10(value) if value > 0 else -math.inf


def _round_numbers(low: float, high: float, *, whole: bool = False) -> list[float]:
    """List the multiples of 1, 2 or 5 times a power of ten between two numbers, about five of them."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    stride = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.99)
    stride = max(stride, 1.0) if whole else stride
    first = math.ceil(low / stride - 1e-9)
    return [place * stride for place in range(first, math.floor(high / stride + 1e-9) + 1)]


Points = Sequence[tuple[int, float]]

_MARGIN_LEFT, _MARGIN_RIGHT, _MARGIN_TOP, _MARGIN_BOTTOM = 52.0, 18.0, 10.0, 40.0
_LOG_FROM = 20.0
"""Highest over lowest loss from which a straight scale shows only the beginning."""
_SMOOTH_FROM = 40
_MOST_MEANS = 240
_LARGEST = 1e100
"""Far beyond fp32; the sum of a few of them would not be finite."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A curve laid out for one width; lengths are units of the SVG, y runs downwards."""

    width: int
    height: int
    left: float
    right: float
    top: float
    bottom: float
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    raw: str
    """The path of every step, thinned to the lowest and highest of each unit of width."""
    smooth: str
    held_out: str
    dots: list[tuple[float, float]]
    best: tuple[float, float] | None
    gaps: list[float]
    """Where a loss is not finite."""


@dataclass(frozen=True, kw_only=True)
class CurveWords:
    """What is said beside a curve, for those who see it and those who do not."""

    description: str
    smooth: str
    best: str
    remarks: list[str]


def draw_curve(curve: Curve, *, width: int, height: int) -> Picture | None:
    """Lay out a curve; None where it has no finite loss."""
    train, held_out = _by_step(curve.train), _by_step(curve.held_out)
    known = [value for _, value in (*train, *held_out) if can_draw(value)]
    if not known:
        return None
    left, right, top, bottom = _MARGIN_LEFT, width - _MARGIN_RIGHT, _MARGIN_TOP, height - _MARGIN_BOTTOM
    x = step_scale([step for step, _ in (*train, *held_out)], left=left, right=right)
    y = (log_scale if is_log(curve) else straight_scale)(known, top=top, bottom=bottom)
    dots = [(_tenth(x.at(step)), _tenth(y.at(value))) for step, value in held_out if can_draw(value)]
    best = best_look(curve)
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
        smooth=_path(_means(train), x=x, y=y),
        held_out=_path(held_out, x=x, y=y),
        dots=_one_per_unit(dots),
        best=(_tenth(x.at(best[0])), _tenth(y.at(best[1]))) if best else None,
        gaps=sorted({float(round(x.at(step))) for step, value in (*train, *held_out) if not can_draw(value)}),
    )


def curve_words(curve: Curve) -> CurveWords:
    """Say in words what a curve shows, and what it cannot show."""
    train, held_out, best = _by_step(curve.train), _by_step(curve.held_out), best_look(curve)
    window = _window(len(train))
    parts = [_course("Training loss", train), _course("Held-out loss", held_out)]
    best_words = f"{loss(best[1])} at step {count(best[0])}" if best else ""
    if best_words:
        parts.append(f"The best held-out loss is {best_words}.")
    return CurveWords(
        description=" ".join(part for part in parts if part),
        smooth=f"mean of {window} steps" if window > 1 else "",
        best=best_words,
        remarks=_remarks(curve),
    )


def best_look(curve: Curve) -> tuple[int, float] | None:
    """Give the held-out point of the best step, or the lowest where none is named."""
    known = [point for point in _by_step(curve.held_out) if can_draw(point[1])]
    named = [point for point in known if point[0] == curve.best_step]
    return min(named or known, key=lambda point: point[1], default=None)


def is_log(curve: Curve) -> bool:
    """Say whether the losses span so much that a logarithmic scale shows more."""
    above = [value for _, value in (*curve.train, *curve.held_out) if can_draw(value) and value > 0]
    return bool(above) and max(above) / _LOG_FROM >= min(above)


def can_draw(value: float) -> bool:
    """Say whether a loss has a height."""
    return math.isfinite(value) and abs(value) < _LARGEST


def _by_step(points: Points) -> list[tuple[int, float]]:
    return sorted(points, key=lambda point: point[0])


def _course(name: str, points: Points) -> str:
    known = [(step, value) for step, value in points if can_draw(value)]
    if not known:
        return ""
    (first, began), (last, ended) = known[0], known[-1]
    if first == last:
        return f"{name} {loss(began)} at step {count(first)}."
    return f"{name} from {loss(began)} at step {count(first)} to {loss(ended)} at step {count(last)}."


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
    if is_log(curve):
        below = sum(can_draw(value) and value <= 0 for _, value in (*curve.train, *curve.held_out))
        if below:
            remarks.append(f"{count(below, 'loss', 'losses')} of 0 drawn at the lower edge, which has no 0.")
    return remarks


def _window(num_points: int) -> int:
    return min(num_points // 20, 500) | 1 if num_points >= _SMOOTH_FROM else 1


def _means(points: Points) -> list[tuple[int, float]]:
    """Average neighbours, at a few hundred places; towards both ends the window narrows to a quarter."""
    half = _window(len(points)) // 2
    if half == 0:
        return []
    last = len(points) - 1
    places = sorted({round(place * last / _MOST_MEANS) for place in range(_MOST_MEANS + 1)})
    means = []
    for place in places:
        reach = max(min(half, place, last - place), half // 4)
        near = [value for _, value in points[max(place - reach, 0) : place + reach + 1] if can_draw(value)]
        is_gap = not can_draw(points[place][1])
        means.append((points[place][0], math.nan if is_gap else math.fsum(near) / len(near)))
    return means


def _path(points: Points, *, x: Scale, y: Scale) -> str:
    """Draw a line through the points, one column of the picture at a time, broken where a value is not finite."""
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
    # A line of one point has no length; with a round end it is still seen.
    rest = "".join(f"L{_tenth(across):g} {_tenth(down):g}" for across, down in line[1:]) or "h0"
    return f"M{_tenth(line[0][0]):g} {_tenth(line[0][1]):g}{rest}"


def _one_per_unit(dots: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Keep a thousand looks from being a thousand circles over each other: one for each three units of width."""
    return list({round(across / 3): (across, down) for across, down in dots}.values())


def _tenth(value: float) -> float:
    return round(value, 1)
