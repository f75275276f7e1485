"""What only the end of a log shows: logs of others have a few lines, each the mean of many steps."""

import math
from collections.abc import Sequence
from statistics import median

from tunewell.training.readings import About, Finding, Reading

_JUMP_FACTOR, _JUMP_NATS = 2.0, 1.5
"""A hard batch among few rows has been seen at 2.8 times the others, 0.8 above them; spikes were 1.5 and more above."""
_ONE_STEP = 0.8
"""Share of a rise that is made in one line where it is a jump."""
_STAYS = 0.85
"""Share of its height at which a loss that jumped has not come back."""
_LONG_AWAY = 8
_MANY = 32


def look_back(readings: Sequence[Reading], about: About) -> list[Finding]:
    """Find what a log's proportions show, however few lines it has."""
    # Step by step, single hard batches are nothing; the rules for a run as it goes have seen the rest.
    is_dense = about.is_raw and len(readings) > _MANY
    found = (None if is_dense else rise(readings), never_moved(readings), learned_by_heart(readings))
    return [finding for finding in found if finding is not None]


def rise(readings: Sequence[Reading]) -> Finding | None:
    """Tell a spike, which jumps and comes back or is the last thing seen, from a loss that left for good."""
    lines = [(r.step, r.loss) for r in readings if r.loss is not None and math.isfinite(r.loss) and r.loss > 0]
    at = next((at for at in range(1, len(lines)) if _is_jump(lines, at)), None)
    if at is None:
        return None
    base = median(loss for _, loss in lines[:at])
    peak = max(loss for _, loss in lines[at:])
    # From the lowest line before the jump on: a rate that is too high lifts a loss over several lines.
    low = min(range(at), key=lambda place: lines[place][1])
    top = max(range(at, len(lines)), key=lambda place: lines[place][1])
    strides = [lines[place + 1][1] - lines[place][1] for place in range(low, top)]
    is_one_stride = max(strides) >= _ONE_STEP * sum(strides)
    away = sum(1 for _, loss in lines[at:] if loss > (base + peak) / 2)
    has_stayed = lines[-1][1] >= _STAYS * peak and (away > 1 or not is_one_stride)
    numbers = {"before": base, "peak": peak, "last": lines[-1][1]}
    step = lines[at][0]
    if has_stayed or away >= _LONG_AWAY:
        words = f"the loss rose from {base:.3g} to {peak:.3g} and did not come back"
        return Finding("lr-too-high", "fault", step, words, numbers)
    words = f"the loss jumped from {base:.3g} to {peak:.3g}"
    return Finding("loss-spike", "warning", step, words, numbers)


def _is_jump(lines: Sequence[tuple[int, float]], at: int) -> bool:
    base = median(loss for _, loss in lines[:at])
    return lines[at][1] >= _JUMP_FACTOR * base and lines[at][1] >= base + _JUMP_NATS


def never_moved(readings: Sequence[Reading]) -> Finding | None:
    """See a log whose every gradient is exactly zero."""
    told = [r for r in readings if r.grad_norm is not None and r.loss != 0.0]
    if not told or any(r.grad_norm != 0.0 for r in told):
        return None
    words = f"the gradient is exactly 0 in all {len(told)} lines: nothing is being trained"
    return Finding("zero-grad-no-learning", "fault", told[0].step, words, {"grad_norm": 0.0, "steps": len(told)})


def learned_by_heart(readings: Sequence[Reading]) -> Finding | None:
    """See the held-out loss end well above its lowest, with the training loss far below it."""
    looks = [(r.step, r.held_out_loss) for r in readings if r.held_out_loss is not None]
    losses = [r.loss for r in readings if r.loss is not None and math.isfinite(r.loss)]
    if len(looks) < 2 or not losses:
        return None
    (low_step, low), (step, last) = min(looks, key=lambda look: look[1]), looks[-1]
    if step <= low_step or last < 1.15 * low or last < low + 0.1 or losses[-1] > 0.5 * last:
        return None
    words = f"the held-out loss rose from {low:.3g} to {last:.3g} while the training loss fell to {losses[-1]:.3g}"
    return Finding("overfitting", "warning", step, words, {"low": low, "low_step": low_step, "now": last})
