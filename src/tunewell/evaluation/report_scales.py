"""The scales of a drawn curve: from a step or a loss to a place in the picture, with round numbers to write there."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from tunewell.core.units import count


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
