"""How the numbers of a run are written: in the panel, in plain lines and in the report alike."""

import math
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from tunewell.cli.render import one_line
from tunewell.config.methods import METHODS
from tunewell.core.units import count

if TYPE_CHECKING:
    from tunewell.records.healing import HealingEntry
    from tunewell.training.events import RunStarted

_BLOCKS = "▁▂▃▄▅▆▇█"
_LONGEST_MODEL = 40


def loss_words(value: float | None) -> str:
    """Write a loss: four digits after the point, fewer where it is large, `nan` and `inf` as they are."""
    if value is None:
        return "unknown"
    return f"{value:.4f}" if not math.isfinite(value) or abs(value) < 1000 else f"{value:.3e}"


def norm_words(value: float) -> str:
    """Write a gradient norm with about three digits."""
    if not math.isfinite(value) or 0.01 <= abs(value) < 1000 or value == 0:
        return f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"
    return f"{value:.1e}"


def speed_words(tokens_per_second: float | None) -> str:
    """Write a speed."""
    if tokens_per_second is None or not math.isfinite(tokens_per_second):
        return "unknown"
    shown = count(round(tokens_per_second)) if tokens_per_second >= 10 else f"{tokens_per_second:.1f}"
    return f"{shown} tokens/s"


def change_words(change: tuple[float, int] | None) -> str:
    """Say where the loss goes: `down 0.11 in 40 steps`; empty while it cannot be said."""
    if change is None:
        return ""
    amount, num_steps = change
    size = f"{abs(amount):.2g}" if abs(amount) < 0.1 else f"{abs(amount):.2f}"
    over = f"in {count(num_steps, 'step')}"
    if abs(amount) < 0.0005:
        return f"level {over}"
    return f"{'down' if amount < 0 else 'up'} {size} {over}"


def size_of_model(number: int) -> str:
    """Write a number of weights: `260,032`, `4.9 M`, `135 M`, `1.1 B`."""
    for unit, limit in (("B", 1e9), ("M", 1e6)):
        if number >= limit * 0.9995:
            value = number / limit
            return f"{value:.1f} {unit}" if value < 99.95 else f"{value:,.0f} {unit}"
    return count(number)


def healing_line(entry: "HealingEntry") -> str:
    """Say in one plain line what went wrong and what was done about it."""
    label = "stopped" if entry.action == "stop" else "warning" if entry.action == "none" else "healed"
    return f"{label}: step {count(entry.step)}: {one_line(entry.words)}"


def model_words(model: str) -> str:
    """Name a model: as it was given, or by the last part of a long path."""
    return one_line(model if len(model) <= _LONGEST_MODEL else PurePath(model).name)


def method_words(start: "RunStarted") -> str:
    """Say how a model is trained: `LoRA rank 16, 4.9 M of 139 M weights, bf16 on cuda:0`."""
    plan = start.plan
    method: dict[str, Any] = plan.config.get("method") or {}
    entry = METHODS.entry(plan.method.value)
    kind = f"{entry.title} rank {method['rank']}" if entry.is_adapter and "rank" in method else entry.title
    weights = f"{size_of_model(start.num_trainable)} of {size_of_model(start.num_parameters)} weights"
    return f"{kind}, {weights}, {plan.precision.value} on {plan.device.value}"


def sparkline(values: list[float], width: int) -> str:
    """Draw the last values as blocks of eight heights; what is not finite is an `x`."""
    shown = values[-width:] if width > 0 else []
    known = [value for value in shown if math.isfinite(value)]
    low, high = min(known, default=0.0), max(known, default=0.0)

    def block(value: float) -> str:
        if not math.isfinite(value):
            return "x"
        share = 0.5 if high == low else (value - low) / (high - low)
        return _BLOCKS[min(int(share * len(_BLOCKS)), len(_BLOCKS) - 1)]

    return "".join(map(block, shown))
