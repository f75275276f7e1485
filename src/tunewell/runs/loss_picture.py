"""The loss curve as a picture: raw steps in light, the mean of neighbours in strong, held-out looks as points."""

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tunewell.core.files import write_atomic
from tunewell.core.optional import import_optional
from tunewell.core.units import count

Points = Sequence[tuple[int, float]]

_INCHES, _DOTS_PER_INCH = (8.0, 5.0), 150
_RAW, _SMOOTH, _HELD_OUT, _BAD, _INK = "#b7cbe3", "#1b5a9e", "#c8541a", "#c22f3d", "#333333"
_ROOM_ABOVE = 1.5
"""A curve is cut at this many times where it began and nearly always was: one spike must not flatten all the rest."""


def draw_losses(path: Path, *, losses: Points, held_out: Points, title: str) -> None:
    """Write the curve as a PNG in one move; raise UserError where matplotlib is not installed."""
    purpose = "a picture of the loss"
    figure = import_optional("matplotlib.figure", extra="train", purpose=purpose).Figure(
        figsize=_INCHES, layout="constrained"
    )
    import_optional("matplotlib.backends.backend_agg", extra="train", purpose=purpose).FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw_training(axes, losses)
    _draw_held_out(axes, held_out)
    _cut_spikes(axes, losses, held_out)
    _mark_bad(axes, losses)
    _dress(axes, title)
    _excuse(axes, steps={step for step, _ in (*losses, *held_out)}, is_empty=not (finite(losses) or finite(held_out)))
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=_DOTS_PER_INCH, facecolor="white", metadata={"Software": None})
    write_atomic(path, picture.getvalue())


def smoothing_window(num_points: int) -> int:
    """Say over how many steps a curve is averaged for display: about a twentieth of them, an odd number."""
    return min(num_points // 20, 500) | 1


def smoothed(values: np.ndarray, window: int) -> np.ndarray:
    """Average each finite value with its finite neighbours; what is not finite is nan.

    Towards the ends the window narrows to about a quarter, so that a curve begins and ends where the losses do.
    """
    known, half = np.isfinite(values), window // 2
    sums = np.convolve(np.where(known, values, 0.0), np.ones(window), mode="same")
    numbers = np.convolve(known.astype(float), np.ones(window), mode="same")
    calm = np.where(known, sums / np.maximum(numbers, 1.0), math.nan)
    for place in (*range(half), *range(max(len(values) - half, half), len(values))):
        reach = max(min(place, len(values) - 1 - place), half // 4)
        near = values[max(place - reach, 0) : place + reach + 1]
        if known[place]:
            calm[place] = near[np.isfinite(near)].mean()
    return calm


def ceiling(losses: Points, held_out: Points) -> float | None:
    """Give the height at which a curve is cut, or None where nothing sticks out far enough to be cut."""
    trained, looked = finite(losses), finite(held_out)
    if not trained and not looked:
        return None
    values = [value for _, value in (*trained, *looked)]
    began = [points[0][1] for points in (trained, looked) if points]
    limit = _ROOM_ABOVE * max(*began, float(np.percentile(values, 98)))
    return limit if 0 < limit < max(values) else None


def finite(points: Points) -> list[tuple[int, float]]:
    """Leave out what is not finite."""
    return [(step, value) for step, value in points if _has_height(value)]


def heights(points: Points) -> np.ndarray:
    """Give the values as an array, nan for what is not finite."""
    return np.array([value if _has_height(value) else math.nan for _, value in points], dtype=float)


def _has_height(value: float) -> bool:
    # Far beyond fp32, the sum of a few of them would not be finite.
    return math.isfinite(value) and abs(value) < 1e100


def _draw_training(axes: Any, losses: Points) -> None:
    if not finite(losses):
        return
    steps = np.array([step for step, _ in losses])
    raw = heights(losses)
    window = smoothing_window(len(losses))
    limit = ceiling(losses, ())
    is_alone = window == 1
    marker = "o" if len(losses) == 1 else ""
    axes.plot(
        steps,
        raw,
        color=_SMOOTH if is_alone else _RAW,
        linewidth=2.0 if is_alone else 1.0,
        marker=marker,
        label="training, each step",
    )
    if not is_alone:
        calm = smoothed(raw if limit is None else np.minimum(raw, limit), window)
        axes.plot(steps, calm, color=_SMOOTH, linewidth=2.2, label=f"training, mean of {window} steps")


def _draw_held_out(axes: Any, held_out: Points) -> None:
    known = finite(held_out)
    if not known:
        return
    steps, values = zip(*known, strict=True)
    axes.plot(steps, values, color=_HELD_OUT, linewidth=1.4, marker="o", markersize=5.5, label="held-out")
    best_step, best = min(known, key=lambda point: point[1])
    label = f"best held-out, {best:.4g} at step {count(best_step)}"
    ring = {"markersize": 13, "markerfacecolor": "none", "markeredgewidth": 1.8, "linestyle": "none"}
    axes.plot([best_step], [best], marker="o", color=_HELD_OUT, label=label, **ring)


def _cut_spikes(axes: Any, losses: Points, held_out: Points) -> None:
    limit = ceiling(losses, held_out)
    if limit is None:
        return
    axes.set_ylim(top=limit)
    # The automatic lower limit leaves room in proportion to the spike, far below zero.
    axes.set_ylim(bottom=min(0.0, *(value for _, value in (*finite(losses), *finite(held_out)))))
    highest = max(value for _, value in (*finite(losses), *finite(held_out)))
    words = f"cut at {limit:.3g}; the highest is {highest:.3g}"
    axes.text(0.01, 0.985, words, transform=axes.transAxes, va="top", fontsize=9, color=_BAD)


def _mark_bad(axes: Any, losses: Points) -> None:
    bad = [step for step, value in losses if not _has_height(value)]
    if bad:
        label = f"not finite, {count(len(bad), 'step')}"
        axes.vlines(bad, 0.0, 0.04, transform=axes.get_xaxis_transform(), color=_BAD, linewidth=1.6, label=label)


def _dress(axes: Any, title: str) -> None:
    ticker = import_optional("matplotlib.ticker", extra="train", purpose="a picture of the loss")
    axes.set_title(title, loc="left", fontsize=13, color=_INK, pad=12, parse_math=False)
    axes.set_xlabel("optimizer step", fontsize=11, color=_INK)
    axes.set_ylabel("loss per supervised token", fontsize=11, color=_INK)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, nbins=8, min_n_ticks=1))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda step, _: count(round(step))))
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=10, colors=_INK, length=3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=10, labelcolor=_INK)


def _excuse(axes: Any, *, steps: set[int], is_empty: bool) -> None:
    """Keep a picture of one step or of none from showing axes that mean nothing."""
    if len(steps) == 1:
        (step,) = steps
        axes.set_xlim(step - 1, step + 1)
    if is_empty:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "no finite loss", transform=axes.transAxes, ha="center", fontsize=13, color=_INK)
