"""Diagnose a complete training log, ours or another trainer's, with rules that need the end of the log.

Logs of other trainers have few lines, and each line is the mean of many steps.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from statistics import correlation, fmean, median, stdev
from typing import NamedTuple

from tunewell.core.units import count
from tunewell.training.health import WINDOW, HealthFinding, HealthMonitor, RunContext, StepMetrics

NOTHING_READ = "nothing-read"
_JUMP_FACTOR, _JUMP_NATS = 2.0, 1.5
"""Measured: a hard batch in a small corpus reached 2.8 times the others, 0.8 above; spikes were at least 1.5 above."""
_HIGH_FACTOR, _HIGH_NATS = 4.0, 3.0
"""A loss above both bounds is not a hard batch, even with a normal gradient norm."""
_BACKED_FACTOR, _BACKED_NATS, _NORM_FACTOR = 1.5, 0.5, 10.0
"""A smaller rise is a jump too if the gradient norm is ten times the median; the hard batch only doubled it."""
_QUIET_NORM = 3.0
_SPREADS = 3.0
_KNOWN_SPREAD = 8
"""Number of lines needed to estimate their spread."""
_ONE_STEP = 0.8
"""A rise is a jump if a single line accounts for this share of it."""
_STAYS = 0.85
"""A loss above this share of its peak has not recovered from a jump."""
_LONG_AWAY = 8
_MANY = 32
_OFTEN = 3
"""Jumps that occur this often and recover at once are hard batches."""
_LEFT_FACTOR, _LEFT_NATS = 1.5, 0.7
_FAR_ABOVE = 1.3
"""Bound on the first loss of fine-tuning, as a multiple of the guess loss. Added tokens alone can cause 1.2."""
_NO_LENGTH = 1e-7
_SAME_LINES, _SAME_DIGITS = 6, 4
"""Equal losses in this many lines and digits are no coincidence. Means of three digits and DPO's ln 2 do repeat."""
_OVERFLOWS_AT_END = 3
_MIN_LINES = 16
_SAME, _SAME_ERRORS = 0.005, 2.2
"""A change of the loss by less than this share, or by fewer standard errors, is not counted."""
_MAX_ERROR = 0.015
"""Two standard errors of the change between the halves of a log, as a share of its mean. With more noise, a fall may be
hidden."""
_MAX_FALL = 0.012
"""Bound on the change along the straight line fitted to a log, as a share of its mean."""
_CONVERGED = 0.7
"""A lower loss may be flat because nothing is left to learn. DPO's loss is ln 2 without an update."""
_FULL_RATE = 0.9
"""Share of the highest learning rate at which the warm-up is over."""


class _Line(NamedTuple):
    step: int
    loss: float
    norm: float | None


def replay(log: Iterable[StepMetrics], about: RunContext) -> list[HealthFinding]:
    """Return the findings of the step rules and the log rules for a log, sorted by step."""
    monitor, seen, found = HealthMonitor(about), [], []
    for metrics in log:
        seen.append(metrics)
        found += monitor.observe(metrics)
    known = {finding.name for finding in found}
    return sorted([*found, *(f for f in apply_log_rules(seen, about) if f.name not in known)], key=lambda f: f.step)


def verdict(findings: Sequence[HealthFinding]) -> str:
    """Return the name of the first finding above a note, or `healthy`, or `nothing-read` if the log has no metrics."""
    if any(finding.name == NOTHING_READ for finding in findings):
        return NOTHING_READ
    return next((finding.name for finding in findings if finding.severity != "note"), "healthy")


def apply_log_rules(log: Sequence[StepMetrics], about: RunContext) -> list[HealthFinding]:
    """Return the findings of the rules that need the complete log."""
    if not log:
        return [HealthFinding(NOTHING_READ, "note", 0, "the log contains no loss and no gradient norm")]
    # In a log of single steps, hard batches are normal, and the step rules have already checked the rest.
    is_dense = about.is_raw and len(log) > _MANY
    found = (
        (None if is_dense else rise(log)) or diverged(log),
        never_moved(log) or flat_loss(log, has_steps=about.is_raw),
        bad_first_loss(log, about),
        overflows_at_end(log, about),
        overfitted(log),
    )
    return [finding for finding in found if finding is not None]


def rise(log: Sequence[StepMetrics]) -> HealthFinding | None:
    """Find a rise of the loss: a spike if it recovers or is the last line, otherwise divergence."""
    lines = _loss_lines(log)
    begin = _KNOWN_SPREAD if len(lines) > _MANY else 1
    at = next((at for at in range(begin, len(lines)) if _is_jump(lines, at)), None)
    if at is None:
        return None
    base = _base(lines, at)
    if _is_hard_batch(lines, at, base):
        return None
    # Start at the lowest line before the jump, because a high learning rate raises the loss over several lines.
    low = min(range(max(0, at - WINDOW), at), key=lambda index: lines[index].loss)
    top = max(range(at, len(lines)), key=lambda index: lines[index].loss)
    peak = lines[top].loss
    strides = [lines[index + 1].loss - lines[index].loss for index in range(low, top)]
    is_one_stride = max(strides) >= _ONE_STEP * sum(strides)
    away = sum(1 for line in lines[at:] if line.loss > (base + peak) / 2)
    has_stayed = lines[-1].loss >= _STAYS * peak and (away > 1 or not is_one_stride)
    numbers = {"before": base, "peak": peak, "last": lines[-1].loss}
    if has_stayed or away >= _LONG_AWAY:
        words = f"the loss rose from {base:.3g} to {peak:.3g} and did not come back"
        return HealthFinding("lr-too-high", "fault", lines[at].step, words, numbers)
    words = f"the loss jumped from {base:.3g} to {peak:.3g}"
    return HealthFinding("loss-spike", "warning", lines[at].step, words, numbers)


def _loss_lines(log: Sequence[StepMetrics]) -> list[_Line]:
    return [
        _Line(r.step, r.loss, r.grad_norm) for r in log if r.loss is not None and math.isfinite(r.loss) and r.loss > 0
    ]


def _base(lines: Sequence[_Line], at: int) -> float:
    return median(line.loss for line in _before(lines, at))


def _before(lines: Sequence[_Line], at: int) -> Sequence[_Line]:
    return lines[max(0, at - WINDOW) : at]


def _is_jump(lines: Sequence[_Line], at: int) -> bool:
    base, loss = _base(lines, at), lines[at].loss
    if loss < _BACKED_FACTOR * base or loss < base + _BACKED_NATS:
        return False
    if (_norm_factor(lines, at) or 0.0) >= _NORM_FACTOR:
        return True
    if loss < _JUMP_FACTOR * base or loss < base + _JUMP_NATS:
        return False
    before = [math.log(line.loss / base) for line in _before(lines, at)]
    spread = 1.4826 * median(abs(value) for value in before) if len(before) >= _KNOWN_SPREAD else 0.0
    return math.log(loss / base) >= _SPREADS * spread


def _norm_factor(lines: Sequence[_Line], at: int) -> float | None:
    """Return the gradient norm of a line divided by the median norm before it, or None if the log has no norms."""
    usual = [line.norm for line in _before(lines, at) if line.norm and math.isfinite(line.norm)]
    norm = lines[at].norm
    return norm / median(usual) if len(usual) > 1 and norm is not None and math.isfinite(norm) else None


def _is_hard_batch(lines: Sequence[_Line], at: int, base: float) -> bool:
    """Return whether a jump is a hard batch: it recovers at once with a normal gradient norm, or it repeats."""
    factor = _norm_factor(lines, at)
    if factor is not None and factor >= _QUIET_NORM:
        return False
    halfway, after = (base + lines[at].loss) / 2, [line.loss for line in lines[at:]]
    is_back = len(after) > 1 and after[1] < halfway
    is_low = lines[at].loss < _HIGH_FACTOR * base or lines[at].loss < base + _HIGH_NATS
    if is_back and is_low and factor is not None:
        return True
    times = sum(1 for is_away, _ in groupby(after, key=lambda loss: loss >= halfway) if is_away)
    return times >= _OFTEN and median(after) < _LEFT_FACTOR * base


def diverged(log: Sequence[StepMetrics]) -> HealthFinding | None:
    """Find divergence: a log that ends above the initial loss and well above its lowest part."""
    lines = _loss_lines(log)
    size = max(4, len(lines) // 10)
    parts = [lines[max(0, end - size) : end] for end in range(len(lines), 0, -size)]
    parts = [part for part in parts if len(part) > 2]
    if len(parts) < 2:
        return None
    last, lowest = parts[0], min(parts[1:], key=_middle)
    now, low, least = _middle(last), _middle(lowest), min(line.loss for line in last)
    is_above = least >= _LEFT_FACTOR * low and least >= low + _LEFT_NATS and now > _middle(lines[:3])
    if not is_above or least <= max(line.loss for line in lowest):
        return None
    words = f"the loss rose from {low:.3g} to {now:.3g} and stays there"
    return HealthFinding(
        "lr-too-high", "warning", last[0].step, words, {"low": low, "low_step": lowest[0].step, "now": now}
    )


def _middle(lines: Sequence[_Line]) -> float:
    return median(line.loss for line in lines)


def never_moved(log: Sequence[StepMetrics]) -> HealthFinding | None:
    """Find a log in which all gradients are zero or all losses are identical."""
    norms = [(abs(r.grad_norm), r.step) for r in log if r.grad_norm is not None and r.loss != 0.0]
    highest, _ = max(norms, default=(math.inf, 0))
    if highest == 0.0 or (len(norms) > 2 and highest < _NO_LENGTH):
        size = "exactly 0" if highest == 0.0 else f"at most {highest:.1g}"
        words = f"the gradient is {size} in all {len(norms)} lines: nothing is being trained"
        numbers = {"grad_norm": highest, "steps": len(norms)}
        return HealthFinding("zero-grad-no-learning", "fault", norms[0][1], words, numbers)
    lines = [r for r in log if r.loss is not None]
    losses = {r.loss for r in lines}
    loss = losses.pop() if len(losses) == 1 and len({r.step for r in lines}) >= _SAME_LINES else None
    if not loss or not math.isfinite(loss) or abs(loss - math.log(2)) < 1e-3:
        return None
    if len(repr(loss).partition("e")[0].replace(".", "").strip("-0")) < _SAME_DIGITS:
        return None
    words = f"the loss is exactly {loss!r} in all {len(lines)} lines: nothing is being trained"
    numbers = {"loss": loss, "steps": len(lines)}
    return HealthFinding("zero-grad-no-learning", "fault", lines[0].step, words, numbers)


def flat_loss(log: Sequence[StepMetrics], *, has_steps: bool = True) -> HealthFinding | None:
    """Find a loss that has certainly not changed since training began.

    The halves of the log must be equal, and so must each beginning (a quarter, ..., the first line) and the rest, as
    a converged run fell early; the fitted line must not fall. Noisy logs, logs that begin late and logs of a warm-up
    are left out. Without `has_steps`, the steps may be numbers of lines.
    """
    held_out = [r.held_out_loss for r in log if r.held_out_loss is not None]
    log = [r for r in log if r.loss is not None and r.is_ordinary and r.supervised_tokens != 0]
    losses, rates = [r.loss or 0.0 for r in log], [r.learning_rate or 0.0 for r in log]
    if len(log) < _MIN_LINES or (level := fmean(losses)) < _CONVERGED:
        return None
    full_rate = next(at for at, rate in enumerate(rates) if rate >= _FULL_RATE * max(rates))
    has_fallen = bool(held_out) and held_out[-1] < (1 - _SAME) * held_out[0]
    if has_fallen or 4 * log[0].step > log[-1].step or 2 * full_rate > len(log):
        return None
    spread, begin = stdev(losses[1:]), len(log) // 2
    fall = -correlation(range(len(log)), losses) * stdev(losses) * math.sqrt(12) if spread else 0.0
    if 4 * spread > _MAX_ERROR * level * math.sqrt(len(log)) or abs(fall) > _MAX_FALL * level:
        return None
    while begin:
        error = spread * math.sqrt(1 / begin + 1 / (len(log) - begin))
        if fmean(losses[:begin]) - fmean(losses[begin:]) > max(_SAME_ERRORS * error, _SAME * level):
            return None
        begin //= 2
    has_steps = has_steps or log[-1].step - log[0].step >= len(log)
    length = count(log[-1].step, "step") if has_steps else count(len(log), "line")
    words = f"the training loss stayed at {level:.3g} for {length}"
    return HealthFinding("flat-loss", "warning", log[-1].step, words, {"level": level})


def bad_first_loss(log: Sequence[StepMetrics], about: RunContext) -> HealthFinding | None:
    """Find a first loss well above the loss of random guessing in a log of fine-tuning."""
    first = next((r for r in log if r.loss is not None), None)
    if about.is_raw or about.is_from_scratch or first is None or first.loss is None:
        return None
    if not math.isfinite(first.loss) or first.loss <= _FAR_ABOVE * about.guess_loss:
        return None
    words = f"the first loss is {first.loss:,.2f}; random guessing gives {about.guess_loss:.2f}: the weights are broken"
    numbers = {"loss": first.loss, "guessing": round(about.guess_loss, 3)}
    return HealthFinding("initial-loss-implausible", "warning", first.step, words, numbers)


def overflows_at_end(log: Sequence[StepMetrics], about: RunContext) -> HealthFinding | None:
    """Find gradients that are not finite in all or in the last lines. A working loss scaler skips fewer steps."""
    lines = [r for r in log if r.grad_norm is not None and r.loss]
    bad = [r.step for r in lines if not r.is_finite]
    at_end = next((at for at, r in enumerate(reversed(lines)) if r.is_finite), len(lines))
    if about.device == "mps" or at_end < 2 or (at_end < _OVERFLOWS_AT_END and at_end < len(lines)):
        return None
    words = f"the gradient is not finite in the last {at_end} lines: training has stopped working"
    return HealthFinding("nan-gradients", "fault", bad[-at_end], words, {"lines": at_end, "of": len(lines)})


def overfitted(log: Sequence[StepMetrics]) -> HealthFinding | None:
    """Find overfitting: a held-out loss that ends well above its minimum, with a much lower training loss."""
    evaluations = [(r.step, r.held_out_loss) for r in log if r.held_out_loss is not None]
    evaluations = [(step, loss) for step, loss in evaluations if math.isfinite(loss)]
    losses = [r.loss for r in log if r.loss is not None and math.isfinite(r.loss)]
    if len(evaluations) < 2 or not losses:
        return None
    # Use the position in the log, because some logs restart the step count at 0 in each epoch.
    lowest = min(range(len(evaluations)), key=lambda at: evaluations[at][1])
    (low_step, low), (step, last) = evaluations[lowest], evaluations[-1]
    if lowest == len(evaluations) - 1 or last < 1.15 * low or last < low + 0.1 or losses[-1] > 0.5 * last:
        return None
    words = f"the held-out loss rose from {low:.3g} to {last:.3g} while the training loss fell to {losses[-1]:.3g}"
    return HealthFinding("overfitting", "warning", step, words, {"low": low, "low_step": low_step, "now": last})
