"""Format the numbers of a run for the panel, the log lines and the result screen: loss, speed, model, method."""

import math
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from tunewell.cli.render import one_line
from tunewell.config.extensions import METHODS
from tunewell.core.units import count

if TYPE_CHECKING:
    from tunewell.records.healing import HealingEntry
    from tunewell.training.events import RunStarted

_LONGEST_MODEL = 40


def format_loss(value: float | None) -> str:
    """Format a loss with four decimals, or with an exponent from 1,000 on. `nan` and `inf` are unchanged."""
    if value is None:
        return "unknown"
    return f"{value:.4f}" if not math.isfinite(value) or abs(value) < 1000 else f"{value:.3e}"


def format_norm(value: float) -> str:
    """Format a gradient norm with about three digits."""
    if not math.isfinite(value) or 0.01 <= abs(value) < 1000 or value == 0:
        return f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"
    return f"{value:.1e}"


def format_speed(tokens_per_second: float | None) -> str:
    """Format a speed in tokens per second."""
    if tokens_per_second is None or not math.isfinite(tokens_per_second):
        return "unknown"
    shown = count(round(tokens_per_second)) if tokens_per_second >= 10 else f"{tokens_per_second:.1f}"
    return f"{shown} tokens/s"


def format_change(change: tuple[float, int] | None) -> str:
    """Format the trend of the loss as `down 0.11 in 40 steps`, or "" if it is unknown."""
    if change is None:
        return ""
    amount, num_steps = change
    size = f"{abs(amount):.2g}" if abs(amount) < 0.1 else f"{abs(amount):.2f}"
    over = f"in {count(num_steps, 'step')}"
    if abs(amount) < 0.0005:
        return f"level {over}"
    return f"{'down' if amount < 0 else 'up'} {size} {over}"


def format_parameters(number: int) -> str:
    """Format a number of parameters as `260,032`, `4.9 M`, `135 M` or `1.1 B`."""
    for unit, limit in (("B", 1e9), ("M", 1e6)):
        if number >= limit * 0.9995:
            value = number / limit
            return f"{value:.1f} {unit}" if value < 99.95 else f"{value:,.0f} {unit}"
    return count(number)


def healing_line(entry: "HealingEntry") -> str:
    """Return one line about a fault and the action taken."""
    label = "stopped" if entry.action == "stop" else "warning" if entry.action == "none" else "healed"
    return f"{label}: step {count(entry.step)}: {one_line(entry.words)}"


def short_model_name(model: str) -> str:
    """Return a model's name, or only the last part if it is a long path."""
    return one_line(model if len(model) <= _LONGEST_MODEL else PurePath(model).name)


def describe_method(start: "RunStarted") -> str:
    """Return how a model is trained, as `LoRA rank 16, 4.9 M of 139 M weights, bf16 on cuda:0`."""
    plan = start.plan
    method: dict[str, Any] = plan.config.get("method") or {}
    entry = METHODS.entry(plan.method.value)
    kind = f"{entry.title} rank {method['rank']}" if entry.is_adapter and "rank" in method else entry.title
    weights = f"{format_parameters(start.num_trainable)} of {format_parameters(start.num_parameters)} weights"
    return f"{kind}, {weights}, {plan.precision.value} on {plan.device.value}"
