"""Health monitor: rules that detect NaN, loss spikes, divergence, overfitting, slow steps and memory spills.

    StepMetrics -> HealthMonitor.observe -> findings      one step at a time, compared with the last 128 steps

A finding has a name, a severity, the numbers behind it, and a one-line message. The thresholds were chosen on logs of
long runs and on reports about short ones; a healthy run must produce nothing above a note. `log_rules.py` checks
complete logs. This module imports only the standard library: its source is also run by other trainers
(`features/engines`).
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunewell.records.healing import Severity

WINDOW = 128
"""Number of earlier steps that a step is compared with."""
LARGEST_VOCABULARY = 262_144
"""The largest vocabulary of common models, which gives an upper bound on the loss of random guessing."""


@dataclass(frozen=True)
class StepMetrics:
    """The metrics of one step, or of one line of another trainer's log. Metrics that are not logged are None."""

    step: int
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    seconds: float | None = None
    tokens: int | None = None
    supervised_tokens: int | None = None
    memory_bytes: int | None = None
    scale: float | None = None
    was_skipped: bool = False
    norm_limit: float | None = None
    held_out_loss: float | None = None
    """The loss of an evaluation; all other metrics are then None."""

    @property
    def is_finite(self) -> bool:
        """Whether the loss and the gradient norm are finite. Unknown values count as finite."""
        return all(value is None or math.isfinite(value) for value in (self.loss, self.grad_norm))

    @property
    def is_ordinary(self) -> bool:
        """Whether the step was finite and not skipped."""
        return self.is_finite and not self.was_skipped


@dataclass(frozen=True)
class RunContext:
    """Facts about a run that the rules need in addition to its metrics."""

    vocab_size: int | None = None
    precision: str | None = None
    device: str | None = None
    max_grad_norm: float | None = None
    device_bytes: int | None = None
    """Total memory of the GPU; None if the device uses host memory."""
    spike_factor: float = 10.0
    is_from_scratch: bool = False
    """Whether training started from random weights, for which any first loss is plausible."""
    is_raw: bool = True
    """Whether losses are logged as computed. Hugging Face's Trainer replaces NaN with the mean of earlier losses."""

    @property
    def guess_loss(self) -> float:
        """The loss of guessing uniformly among all tokens."""
        return math.log(self.vocab_size or LARGEST_VOCABULARY)


@dataclass(frozen=True)
class HealthFinding:
    """A problem or a note about one step."""

    name: str
    severity: "Severity"
    step: int
    words: str
    numbers: dict[str, Any] = field(default_factory=dict)


@dataclass
class HealthMonitor:
    """Checks the steps of one run, in order. It keeps what the rules need to know about the earlier steps."""

    about: RunContext
    first: StepMetrics | None = None
    recent: deque[StepMetrics] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Ordinary steps, newest last."""
    lowest: float = math.inf
    """The lowest median loss of eight steps so far."""
    low_step: int = 0
    first_losses: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    degenerate: list[int] = field(default_factory=list)
    """Steps of the last evaluations in a row whose sample answers were degenerate."""
    base_faulty: int = 0
    """Number of degenerate sample answers of the base model, at step 0."""
    has_answered: bool = False
    """Whether a sample answer after step 0 was not degenerate."""
    bad_in_a_row: int = 0
    zero_norms_in_a_row: int = 0
    zero_losses_in_a_row: int = 0
    reported: set[str] = field(default_factory=set)

    def are_most_faulty(self, num_faulty: int, num_samples: int) -> bool:
        """Return True if all samples are degenerate, or at least half of them and two more than at step 0."""
        is_worse = num_faulty >= max(num_samples / 2, self.base_faulty + _MORE_FAULTY)
        return num_faulty == num_samples or is_worse

    def add_answers(self, step: int, are_degenerate: bool | None, num_faulty: int) -> None:
        """Add the sample answers of an evaluation. Those at step 0, of the base model, are only a reference."""
        if step == 0:
            self.base_faulty = num_faulty
        elif are_degenerate is not None:
            self.degenerate = [*self.degenerate, step] if are_degenerate else []
            self.has_answered = self.has_answered or not are_degenerate

    def norms(self) -> list[float]:
        return [r.grad_norm for r in self.recent if r.grad_norm is not None and r.grad_norm > 0]

    def losses(self, last: int) -> list[float]:
        return [r.loss for r in list(self.recent)[-last:] if r.loss is not None]

    def has_learned(self) -> bool:
        """Return whether the training loss has fallen below that of the first step."""
        return bool(self.recent) and median(self.losses(RECENT)) < self.first_losses[0]

    def observe(self, metrics: StepMetrics) -> list[HealthFinding]:
        """Add a step and return its findings, the most severe first."""
        if metrics.supervised_tokens == 0:
            return []  # all documents of the step are left out, so it has no metrics
        if metrics.norm_limit is None and metrics.grad_norm is not None:
            metrics = replace(metrics, norm_limit=self.norm_limit())
        found = [finding for rule in _RULES if (finding := rule(metrics, self)) is not None]
        for name, rule in _RULES_ONCE.items():
            if name not in self.reported and (finding := rule(metrics, self)) is not None:
                self.reported.add(name)
                found.append(finding)
        self.remember(metrics)
        return sorted(found, key=lambda finding: _ORDER[finding.severity])

    def norm_limit(self) -> float:
        """Return the gradient norm above which the next update must be skipped."""
        return norm_limit(self.norms(), factor=self.about.spike_factor, floor=self.about.max_grad_norm or 1.0)

    def rewind(self, step: int) -> None:
        """Remove the steps after this one from the history, because they are repeated."""
        kept = [metrics for metrics in self.recent if metrics.step <= step]
        self.recent = deque(kept, maxlen=WINDOW)
        self.held_out = [(at, loss) for at, loss in self.held_out if at <= step]
        self.degenerate, self.has_answered = [at for at in self.degenerate if at <= step], False
        self.bad_in_a_row = self.zero_norms_in_a_row = self.zero_losses_in_a_row = 0
        self.reported -= {"lr-too-high", "loss-spike"}
        if self.low_step > step:
            self.lowest, self.low_step = math.inf, 0

    def remember(self, metrics: StepMetrics) -> None:
        """Add a step to the history without checking it."""
        if metrics.supervised_tokens == 0:
            return
        if metrics.held_out_loss is not None:
            self.held_out.append((metrics.step, metrics.held_out_loss))
            return
        if self.first is None and metrics.loss is not None:
            self.first = metrics
        self.bad_in_a_row = 0 if metrics.is_finite else self.bad_in_a_row + 1
        self.zero_norms_in_a_row = self.zero_norms_in_a_row + 1 if metrics.grad_norm == 0 else 0
        self.zero_losses_in_a_row = self.zero_losses_in_a_row + 1 if metrics.loss == 0 else 0
        if metrics.is_ordinary:
            self.recent.append(metrics)
            if len(self.first_losses) < _FIRST and metrics.loss is not None:
                self.first_losses.append(metrics.loss)
            losses = self.losses(RECENT)
            if len(losses) == RECENT and (low := median(losses)) < self.lowest:
                self.lowest, self.low_step = low, metrics.step


_MORE_FAULTY = 2
"""Number of degenerate sample answers more than at step 0. A single one may be chance."""

# The rules. Each takes the metrics of a step and the monitor before it, and returns a finding or None.

ARMED_AFTER = 32
"""Number of steps before a step can be called unusual. Typical runs have a few hundred steps."""
RECENT = 8
"""The current loss is the median of this many steps."""
_FIRST = 3
"""The initial loss is the median of this many steps."""
_SPREADS = 3.0
"""A loss that is this many standard deviations higher has diverged."""
_GUESSES = 0.5
"""A loss above this share of the guess loss means that the model has forgotten what it knew."""
_WORSE = 1.2
"""A loss above this multiple of the guess loss, and above an earlier loss, is that of a broken model."""
_MANY_OVERFLOWS = 8
_NOTE_ABOVE, _FAR_ABOVE = 1.1, 2.0
"""Bounds on the first loss, as multiples of the guess loss. A model with random weights starts at 1."""
_ZERO_STEPS = 3
_SLOW_FACTOR = 3.0
_CYCLE_FACTOR = 5.0

Rule = Callable[[StepMetrics, HealthMonitor], HealthFinding | None]


def not_finite(metrics: StepMetrics, past: HealthMonitor) -> HealthFinding | None:
    """Find a NaN or infinite loss or gradient. A single overflow in fp16 is normal: the loss scaler handles it."""
    if metrics.is_finite:
        return None
    about, numbers = past.about, {"loss": metrics.loss, "grad_norm": metrics.grad_norm}
    is_loss = metrics.loss is not None and not math.isfinite(metrics.loss)
    is_mps, has_scaler = about.device == "mps", about.precision == "fp16" or metrics.scale is not None
    what, name, num_bad = "loss" if is_loss else "gradient", "nan-gradients", past.bad_in_a_row + 1
    words = f"the {what} is not finite"
    if is_mps and about.precision in ("fp16", "bf16", None):
        name, words = "mps-nan-fp16", f"{words}, in {about.precision or '16 bits'} on an Apple GPU"
    elif not is_mps and has_scaler and not is_loss and metrics.loss != 0.0:
        if num_bad < _MANY_OVERFLOWS:
            words = "a gradient overflowed in fp16: the update was skipped and the loss scale halved, which is normal"
            return HealthFinding("fp16-scaler-skip-benign", "note", metrics.step, words, numbers)
        name, numbers["scale"] = "loss-scale-exhausted", metrics.scale
        words = f"gradients overflowed in {num_bad} steps in a row: no loss scale is small enough"
    elif not is_mps and (risen := _has_risen(past)):
        name, (low, low_step, last) = "lr-too-high", risen
        words = f"the loss rose from {low:.3g} at step {low_step} to {last:.3g}; then the {what} was not finite"
        numbers |= {"low": low, "low_step": low_step, "learning_rate": metrics.learning_rate}
    elif metrics.loss == 0.0 and not about.is_raw:
        name = "loss-zero-collapse"
        words = "the log shows a loss of 0, but the gradient is not finite: the trainer's log hides a NaN"
    return HealthFinding(name, "fault", metrics.step, words, numbers)


def _has_risen(past: HealthMonitor) -> tuple[float, int, float] | None:
    """Return the lowest loss, its step and the last loss if the loss had risen before the NaN, otherwise None."""
    known = [(r.loss, r.step) for r in past.recent if r.loss is not None]
    if not known:
        return None
    (low, low_step), last = min(known), known[-1][0]
    # In a healthy run, the losses of small batches vary widely; the lines of a log are means over many steps.
    if len(known) >= 2 * RECENT:
        low, low_step, last = past.lowest, past.low_step, median(loss for loss, _ in known[-RECENT // 2 :])
    elif known[-1][1] - known[0][1] < len(known) and sorted(known[-_FIRST:]) != known[-_FIRST:]:
        return None
    return (low, low_step, last) if last > 1.5 * low and last > low + 1.0 else None


def pinned_at_zero(metrics: StepMetrics, past: HealthMonitor) -> HealthFinding | None:
    """Find a loss that suddenly becomes exactly 0. The loss of memorised rows approaches 0 gradually."""
    if metrics.loss != 0.0 or metrics.supervised_tokens == 0 or not metrics.is_finite:
        return None
    before = past.losses(RECENT)
    if before and median(before) < 1e-3:
        return None
    # In a log with two to four digits, the loss of memorised rows is rounded to 0.
    positive = [loss for loss in before if loss > 0]
    if len(positive) > 1 and positive[-1] < min(0.02, positive[0]):
        return None
    # The unrounded loss of a few memorised tokens can reach 0; the mean over many steps cannot.
    if past.about.is_raw and past.zero_losses_in_a_row + 1 < _ZERO_STEPS:
        return None
    numbers = {"loss": 0.0, "before": before[-1] if before else None, "grad_norm": metrics.grad_norm}
    words = "the loss is exactly 0, which no model reaches: no token is supervised, or the numbers are broken"
    return HealthFinding("loss-zero-collapse", "fault", metrics.step, words, numbers)


def first_loss(metrics: StepMetrics, past: HealthMonitor) -> HealthFinding | None:
    """Compare the first loss with the loss of random guessing."""
    if past.first is not None or metrics.loss is None or not math.isfinite(metrics.loss):
        return None
    about = past.about
    guess = about.guess_loss
    numbers = {"loss": metrics.loss, "guessing": round(guess, 3)}
    if metrics.loss > _FAR_ABOVE * guess and not about.is_from_scratch:
        words = f"the first loss is {metrics.loss:,.2f}; random guessing gives {guess:.2f}: the weights are broken"
        return HealthFinding("initial-loss-implausible", "warning", metrics.step, words, numbers)
    if metrics.loss > _NOTE_ABOVE * guess:
        words = f"the first loss is {metrics.loss:,.2f}, above the {guess:.2f} of random guessing"
        return HealthFinding("initial-loss-high", "note", metrics.step, words, numbers)
    return None


def no_gradient(metrics: StepMetrics, past: HealthMonitor) -> HealthFinding | None:
    """Find gradients that are exactly zero, so that nothing is trained."""
    if metrics.grad_norm != 0.0 or metrics.supervised_tokens == 0 or metrics.loss == 0.0:
        return None
    in_a_row = past.zero_norms_in_a_row + 1
    if in_a_row != _ZERO_STEPS:
        return None
    words = f"the gradient was exactly 0 in {in_a_row} steps in a row: nothing is being trained"
    return HealthFinding("zero-grad-no-learning", "fault", metrics.step, words, {"grad_norm": 0.0, "steps": in_a_row})


def spike(metrics: StepMetrics, past: HealthMonitor) -> HealthFinding | None:
    """Find a spike: an update that was skipped because its gradient norm was above the limit."""
    norm, limit = metrics.grad_norm, metrics.norm_limit
    if norm is None or limit is None or not math.isfinite(norm) or norm <= limit:
        return None
    usual = median(past.norms())
    words = f"the gradient norm jumped from about {usual:.3g} to {norm:.3g}"
    numbers = {"grad_norm": norm, "usual": usual, "limit": limit, "loss": metrics.loss}
    return HealthFinding("loss-spike", "warning", metrics.step, words, numbers)


def divergence(metrics: StepMetrics, past: HealthMonitor) -> HealthFinding | None:
    """Find divergence: a loss that rose and stays high."""
    if metrics.loss is None or not metrics.is_ordinary:
        return None
    recent = [*past.losses(RECENT - 1), metrics.loss]
    if len(recent) < RECENT or not math.isfinite(past.lowest):
        return None
    now, low, low_step = median(recent), past.lowest, past.low_step
    if (first := median(past.first_losses)) < low:
        low, low_step = first, 0
    # A single loss is noisy, but a model with a low first loss should not be near random guessing later.
    if past.first is not None and past.first.loss is not None and now >= _GUESSES * past.about.guess_loss:
        low, low_step = min((low, low_step), (past.first.loss, past.first.step))
    if not is_far_above(now, low, past.about) or min(recent) <= low + 0.5:
        return None
    before = [r.loss for r in past.recent if r.loss is not None and r.step <= low_step]
    if len(before) >= RECENT and now <= low + _SPREADS * _spread(before):
        return None
    words = f"the loss rose from {low:.3g} at step {low_step} to {now:.3g} and stays there"
    numbers = {"low": low, "low_step": low_step, "now": now, "learning_rate": metrics.learning_rate}
    return HealthFinding("lr-too-high", "fault", metrics.step, words, numbers)


def is_far_above(now: float, low: float, about: RunContext) -> bool:
    """Return whether a loss has diverged from an earlier one: it is much higher, or worse than random guessing."""
    return now > low + 1.0 and (now > 1.5 * low + 0.5 or now > _WORSE * about.guess_loss)


def _spread(values: list[float]) -> float:
    """Return an estimate of the standard deviation that is robust to outliers (scaled MAD)."""
    middle = median(values)
    return 1.4826 * median(abs(value - middle) for value in values)


def held_out_not_finite(metrics: StepMetrics, past: HealthMonitor) -> HealthFinding | None:
    """Find a NaN or infinite held-out loss."""
    loss = metrics.held_out_loss
    if loss is None or math.isfinite(loss):
        return None
    words = "the held-out loss is not finite: a weight, or a value computed from those rows, is NaN or infinite"
    return HealthFinding("nan-gradients", "warning", metrics.step, words, {"held_out_loss": loss})


def over_fitting(metrics: StepMetrics, past: HealthMonitor) -> HealthFinding | None:
    """Find overfitting: a held-out loss that keeps rising while the training loss does not."""
    now = metrics.held_out_loss
    if now is None or len(past.held_out) < 2 or not math.isfinite(now):
        return None
    losses = [loss for _, loss in past.held_out if math.isfinite(loss)]
    low = min(losses, default=math.inf)
    is_rising = len(losses) >= 2 and losses[-1] > low and now > losses[-1]
    if not is_rising or now < 1.15 * low or now < low + 0.1:
        return None
    # Compare with the training loss at the lowest held-out loss; a log may have no line that early.
    low_step = min(past.held_out, key=lambda evaluation: evaluation[1])[0]
    before = [r.loss for r in past.recent if r.loss is not None and r.step <= low_step] or past.first_losses[:1]
    after = past.losses(RECENT)
    if before and after and median(after) >= median(before[-RECENT:]):
        return None
    words = f"the held-out loss rose from {low:.3g} to {now:.3g}: the model memorises the training rows"
    return HealthFinding("overfitting", "warning", metrics.step, words, {"low": low, "low_step": low_step, "now": now})


def memory_spill(metrics: StepMetrics, past: HealthMonitor) -> HealthFinding | None:
    """Find steps that stay slow while GPU memory is full, because the driver spills to host memory."""
    about = past.about
    if about.device_bytes is None or metrics.memory_bytes is None or metrics.memory_bytes < 0.95 * about.device_bytes:
        return None
    factor = _slowdown(metrics, past)
    if factor is None:
        return None
    words = f"steps became {factor:.1f} times slower with full GPU memory: the driver moves data to host memory"
    numbers = {"factor": round(factor, 2), "memory_bytes": metrics.memory_bytes, "device_bytes": about.device_bytes}
    return HealthFinding("memory-spill", "warning", metrics.step, words, numbers)


def slow(metrics: StepMetrics, past: HealthMonitor) -> HealthFinding | None:
    """Find a lasting drop in speed. It is only a note, because another program may be the cause."""
    factor = _slowdown(metrics, past)
    if factor is None:
        return None
    words = f"steps became {factor:.1f} times slower than they were"
    return HealthFinding("throughput-cliff", "note", metrics.step, words, {"factor": round(factor, 2)})


def slow_fast_cycles(metrics: StepMetrics, past: HealthMonitor) -> HealthFinding | None:
    """Find single steps that take many times as long as the others, at regular intervals."""
    paces = [(r.step, pace) for r in [*past.recent, metrics] if (pace := _pace(r)) is not None]
    if len(paces) < 2 * ARMED_AFTER:
        return None
    usual = median(pace for _, pace in paces)
    slow_steps = [step for step, pace in paces if pace > _CYCLE_FACTOR * usual]
    gaps = [second - first for first, second in pairwise(slow_steps)]
    if len(gaps) < 3 or max(gaps) > min(gaps) + 1 or min(gaps) < 3:
        return None
    words = f"every {round(median(gaps))} steps, one takes over {_CYCLE_FACTOR:.0f} times as long as the others"
    return HealthFinding(
        "slow-fast-cycles", "note", metrics.step, words, {"every": median(gaps), "steps": slow_steps[-4:]}
    )


_RULES: tuple[Rule, ...] = (not_finite, pinned_at_zero, first_loss, no_gradient, spike)
_RULES_ONCE: dict[str, Rule] = {
    "lr-too-high": divergence,
    "held-out-not-finite": held_out_not_finite,
    "overfitting": over_fitting,
    "memory-spill": memory_spill,
    "throughput-cliff": slow,
    "slow-fast-cycles": slow_fast_cycles,
}
"""Rules that report at most once per run. `History.reported` holds their names."""


def _pace(metrics: StepMetrics) -> float | None:
    """Return the seconds per token."""
    return metrics.seconds / metrics.tokens if metrics.seconds and metrics.tokens else None


def _slowdown(metrics: StepMetrics, past: HealthMonitor) -> float | None:
    """Return how many times slower the last eight steps are than earlier ones, or None if not all of them are slow."""
    paces = [pace for r in [*past.recent, metrics] if (pace := _pace(r)) is not None]
    if len(paces) < ARMED_AFTER:
        return None
    before, now = median(paces[:-RECENT]), paces[-RECENT:]
    return median(now) / before if min(now) > _SLOW_FACTOR * before else None


_SIGMAS = 6.0
_LEAST_SIGMA = 0.25
"""Lower bound for the standard deviation of the log norms. Six times this value is a factor of 4.5."""
_ORDER: dict[str, int] = {"fault": 0, "warning": 1, "note": 2}


def norm_limit(norms: Sequence[float], *, factor: float, floor: float) -> float:
    """Return the gradient norm above which an update counts as a spike; infinity during the first 32 steps.

    A spike must exceed four bounds, so that a hard batch does not count as one: `factor` times the median, six
    standard deviations on a logarithmic scale, twice the largest norm of the window, and the clipping norm.
    """
    if len(norms) < ARMED_AFTER:
        return math.inf
    logs = [math.log(norm) for norm in norms]
    middle, sigma = median(logs), max(_LEAST_SIGMA, _spread(logs))
    return max(math.exp(middle + _SIGMAS * sigma), factor * math.exp(middle), 2.0 * max(norms), floor)
