"""The rules by which a step is judged: each takes a reading and what was before it, and finds one thing or nothing."""

import math
from collections.abc import Callable
from itertools import pairwise
from statistics import median

from tunewell.training.metrics import Finding, History, RunContext, StepMetrics

ARMED_AFTER = 32
"""Steps that must be known before one can be called unusual: runs here have a few hundred."""
RECENT = 8
"""Steps whose median stands for where the loss is now."""
BEGINNING = 3
"""Steps whose median stands for where the loss began."""
_SPREADS = 3.0
"""A loss has left where it is so many times its own spread away."""
_GUESSES = 0.5
"""A loss from here on, in units of what guessing costs, is one of a model that lost what it knew."""
_MANY_OVERFLOWS = 8
_NOTE_ABOVE, _FAR_ABOVE = 1.1, 2.0
"""First losses, in units of what guessing costs. A model that starts from nothing begins at 1."""
_ZERO_STEPS = 3
_SLOW_FACTOR = 3.0
_CYCLE_FACTOR = 5.0

Rule = Callable[[StepMetrics, History, RunContext], Finding | None]


def not_finite(reading: StepMetrics, history: History, about: RunContext) -> Finding | None:
    """See a loss or a gradient that is not finite; a lone overflow under an fp16 scaler is how a scaler works."""
    if reading.is_finite:
        return None
    numbers = {"loss": reading.loss, "grad_norm": reading.grad_norm}
    is_loss = reading.loss is not None and not math.isfinite(reading.loss)
    if (about.precision == "fp16" or reading.scale is not None) and not is_loss and reading.loss != 0.0:
        if history.bad_in_a_row + 1 < _MANY_OVERFLOWS and about.device != "mps":
            words = "a gradient overflowed in fp16: the update was left out and the scale halved, as it should be"
            return Finding("fp16-scaler-skip-benign", "note", reading.step, words, numbers)
        if about.device != "mps":
            words = f"gradients overflowed in {history.bad_in_a_row + 1} steps in a row: no scale is small enough"
            return Finding("loss-scale-exhausted", "fault", reading.step, words, numbers | {"scale": reading.scale})
    what = "loss" if is_loss else "gradient"
    if about.device != "mps" and (risen := _has_risen(history)):
        low, low_step, last = risen
        words = f"the loss rose from {low:.3g} at step {low_step} to {last:.3g}, and then the {what} was not finite"
        numbers |= {"low": low, "low_step": low_step, "learning_rate": reading.learning_rate}
        return Finding("lr-too-high", "fault", reading.step, words, numbers)
    if about.device == "mps" and about.precision in ("fp16", "bf16", None):
        words = f"the {what} is not finite, in {about.precision or '16 bits'} on an Apple GPU"
        return Finding("mps-nan-fp16", "fault", reading.step, words, numbers)
    if not is_loss and reading.loss == 0.0 and not about.is_raw:
        words = "the loss is shown as 0 and the gradient is not finite: a NaN that the trainer's log hides"
        return Finding("loss-zero-collapse", "fault", reading.step, words, numbers)
    return Finding("nan-gradients", "fault", reading.step, f"the {what} is not finite", numbers)


def _has_risen(history: History) -> tuple[float, int, float] | None:
    """Give the lowest loss, its step and the last one, where it had left before it broke."""
    told = [(r.loss, r.step) for r in history.recent if r.loss is not None]
    if not told:
        return None
    (low, low_step), last = min(told), told[-1][0]
    # Single losses of small batches are far apart when all is well; the lines of a log are means of many.
    if len(told) >= 2 * RECENT:
        low, low_step, last = history.lows, history.low_step, median(loss for loss, _ in told[-RECENT // 2 :])
    elif told[-1][1] - told[0][1] < len(told) and sorted(told[-BEGINNING:]) != told[-BEGINNING:]:
        return None
    return (low, low_step, last) if last > 1.5 * low and last > low + 1.0 else None


def pinned_at_zero(reading: StepMetrics, history: History, about: RunContext) -> Finding | None:
    """See a loss of exactly nothing: what is learned by heart comes near it, and does not jump there."""
    if reading.loss != 0.0 or reading.supervised_tokens == 0 or not reading.is_finite:
        return None
    before = history.losses(RECENT)
    if before and median(before) < 1e-3:
        return None
    # What is learned by heart comes to 0 in a log of two or four digits.
    told = [loss for loss in before if loss > 0]
    if len(told) > 1 and told[-1] < min(0.02, told[0]):
        return None
    # Computed exactly, a few tokens that are known by heart do come to 0; a log's rounded mean of many steps does not.
    if about.is_raw and history.zero_losses_in_a_row + 1 < _ZERO_STEPS:
        return None
    numbers = {"loss": 0.0, "before": before[-1] if before else None, "grad_norm": reading.grad_norm}
    words = "the loss is exactly 0, which no model reaches: nothing is learned, or numbers are broken"
    return Finding("loss-zero-collapse", "fault", reading.step, words, numbers)


def first_loss(reading: StepMetrics, history: History, about: RunContext) -> Finding | None:
    """Hold the first loss against what guessing costs."""
    if history.first is not None or reading.loss is None or not math.isfinite(reading.loss):
        return None
    guess = about.guessing
    numbers = {"loss": reading.loss, "guessing": round(guess, 3)}
    if reading.loss > _FAR_ABOVE * guess and not about.is_from_scratch:
        words = f"the first loss is {reading.loss:,.2f}, and guessing costs {guess:.2f}: weights or numbers are broken"
        return Finding("initial-loss-implausible", "warning", reading.step, words, numbers)
    if reading.loss > _NOTE_ABOVE * guess:
        words = f"the first loss is {reading.loss:,.2f}, above the {guess:.2f} that guessing costs"
        return Finding("initial-loss-high", "note", reading.step, words, numbers)
    return None


def no_gradient(reading: StepMetrics, history: History, about: RunContext) -> Finding | None:
    """See gradients of exactly zero: nothing is trained."""
    if reading.grad_norm != 0.0 or reading.supervised_tokens == 0 or reading.loss == 0.0:
        return None
    in_a_row = history.zero_norms_in_a_row + 1
    if in_a_row != _ZERO_STEPS:
        return None
    words = f"the gradient was exactly 0 in {in_a_row} steps in a row: nothing is being trained"
    return Finding("zero-grad-no-learning", "fault", reading.step, words, {"grad_norm": 0.0, "steps": in_a_row})


def spike(reading: StepMetrics, history: History, about: RunContext) -> Finding | None:
    """See an update that was left out because its gradient was far too long."""
    norm, limit = reading.grad_norm, reading.norm_limit
    if norm is None or limit is None or not math.isfinite(norm) or norm <= limit:
        return None
    usual = median(history.norms())
    words = f"the gradient's length jumped from about {usual:.3g} to {norm:.3g}"
    numbers = {"grad_norm": norm, "usual": usual, "limit": limit, "loss": reading.loss}
    return Finding("loss-spike", "warning", reading.step, words, numbers)


def divergence(reading: StepMetrics, history: History, about: RunContext) -> Finding | None:
    """See a loss that left where it was and stays away."""
    if reading.loss is None or not reading.is_quiet or "lr-too-high" in history.said:
        return None
    recent = [*history.losses(RECENT - 1), reading.loss]
    if len(recent) < RECENT or not math.isfinite(history.lows):
        return None
    now, low, low_step = median(recent), history.lows, history.low_step
    if (first := median(history.beginning)) < low:
        low, low_step = first, 0
    # One step says little about the next, but a model that knew its first documents does not guess at all the others.
    if history.first is not None and history.first.loss is not None and now >= _GUESSES * about.guessing:
        low, low_step = min((low, low_step), (history.first.loss, history.first.step))
    if now <= 1.5 * low + 0.5 or now <= low + 1.0 or min(recent) <= low + 0.5:
        return None
    before = [r.loss for r in history.recent if r.loss is not None and r.step <= low_step]
    if len(before) >= RECENT and now <= low + _SPREADS * _spread(before):
        return None
    history.said.add("lr-too-high")
    words = f"the loss rose from {low:.3g} at step {low_step} to {now:.3g} and stays there"
    numbers = {"low": low, "low_step": low_step, "now": now, "learning_rate": reading.learning_rate}
    return Finding("lr-too-high", "fault", reading.step, words, numbers)


def _spread(values: list[float]) -> float:
    """Estimate the standard deviation of values, whatever a few of them are."""
    middle = median(values)
    return 1.4826 * median(abs(value - middle) for value in values)


def held_out_not_finite(reading: StepMetrics, history: History, about: RunContext) -> Finding | None:
    """See a held-out loss that is not finite while training goes on."""
    loss = reading.held_out_loss
    if loss is None or math.isfinite(loss) or "held-out-not-finite" in history.said:
        return None
    history.said.add("held-out-not-finite")
    words = "the held-out loss is not finite: weights, or numbers in those rows, are broken"
    return Finding("nan-gradients", "warning", reading.step, words, {"held_out_loss": loss})


def over_fitting(reading: StepMetrics, history: History, about: RunContext) -> Finding | None:
    """See the held-out loss rise look after look while the training loss falls."""
    now = reading.held_out_loss
    if now is None or len(history.held_out) < 2 or "overfitting" in history.said or not math.isfinite(now):
        return None
    looks = [loss for _, loss in history.held_out if math.isfinite(loss)]
    low = min(looks, default=math.inf)
    is_rising = len(looks) >= 2 and looks[-1] > low and now > looks[-1]
    if not is_rising or now < 1.15 * low or now < low + 0.1:
        return None
    # Against where training was when the held-out loss was lowest; a log may have no line that early.
    low_step = min(history.held_out, key=lambda look: look[1])[0]
    before = [r.loss for r in history.recent if r.loss is not None and r.step <= low_step][-RECENT:]
    after = history.losses(RECENT)
    if before and after and median(after) > median(before):
        return None
    history.said.add("overfitting")
    words = f"the held-out loss rose from {low:.3g} to {now:.3g} while rows are learned by heart"
    return Finding("overfitting", "warning", reading.step, words, {"low": low, "low_step": low_step, "now": now})


def memory_spill(reading: StepMetrics, history: History, about: RunContext) -> Finding | None:
    """See steps become slow for good while the device's memory is full: the driver has begun to use the host's."""
    if about.device_bytes is None or reading.memory_bytes is None or "memory-spill" in history.said:
        return None
    factor = _slowdown(reading, history)
    if factor is None or reading.memory_bytes < 0.95 * about.device_bytes:
        return None
    history.said.add("memory-spill")
    words = f"steps became {factor:.1f} times slower with the device's memory full: it spills to the host"
    numbers = {"factor": round(factor, 2), "memory_bytes": reading.memory_bytes, "device_bytes": about.device_bytes}
    return Finding("memory-spill", "warning", reading.step, words, numbers)


def slow(reading: StepMetrics, history: History, about: RunContext) -> Finding | None:
    """See speed fall off a cliff and stay there; something else on the machine may be why, so it is a note."""
    factor = None if "throughput-cliff" in history.said else _slowdown(reading, history)
    if factor is None:
        return None
    history.said.add("throughput-cliff")
    words = f"steps became {factor:.1f} times slower than they were"
    return Finding("throughput-cliff", "note", reading.step, words, {"factor": round(factor, 2)})


def slow_fast_cycles(reading: StepMetrics, history: History, about: RunContext) -> Finding | None:
    """See single steps that take many times as long as the others, again and again at like distances."""
    if "slow-fast-cycles" in history.said or len(history.recent) < 2 * ARMED_AFTER:
        return None
    paces = [(r.step, pace) for r in [*history.recent, reading] if (pace := _pace(r)) is not None]
    if len(paces) < 2 * ARMED_AFTER:
        return None
    usual = median(pace for _, pace in paces)
    slow_steps = [step for step, pace in paces if pace > _CYCLE_FACTOR * usual]
    gaps = [second - first for first, second in pairwise(slow_steps)]
    if len(gaps) < 3 or max(gaps) > min(gaps) + 1 or min(gaps) < 3:
        return None
    history.said.add("slow-fast-cycles")
    words = f"every {round(median(gaps))} steps one takes over {_CYCLE_FACTOR:.0f} times as long as the others"
    return Finding("slow-fast-cycles", "note", reading.step, words, {"every": median(gaps), "steps": slow_steps[-4:]})


RULES: tuple[Rule, ...] = (
    not_finite,
    pinned_at_zero,
    first_loss,
    no_gradient,
    spike,
    divergence,
    held_out_not_finite,
    over_fitting,
    memory_spill,
    slow,
    slow_fast_cycles,
)


def _pace(reading: StepMetrics) -> float | None:
    """Give the seconds a token took."""
    return reading.seconds / reading.tokens if reading.seconds and reading.tokens else None


def _slowdown(reading: StepMetrics, history: History) -> float | None:
    """Say how many times slower the last eight steps were than those before, where that is a cliff."""
    paces = [pace for r in [*history.recent, reading] if (pace := _pace(r)) is not None]
    if len(paces) < ARMED_AFTER:
        return None
    before, now = median(paces[:-RECENT]), paces[-RECENT:]
    return median(now) / before if min(now) > _SLOW_FACTOR * before else None
