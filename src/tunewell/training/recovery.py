"""Decide how a run recovers from bad steps (NaN, spikes, divergence), and record the remedies in force.

    bad documents skip the update and leave the documents out, as long as they are few
    not finite    skip the update -> rewind without the step's documents -> half the rate -> fp32 -> CPU -> stop
    spike         skip the update -> rewind without the documents -> half the rate -> stop
    divergence    rewind to before the rise with half the rate, up to `healing.max_rewinds` times -> stop
    loss of 0     rewind to before the first zero, once -> stop
    no gradient   stop
    bad answers   stop, if `healing.behaviour` is `stop`

Each remedy is tried once; a new problem within `healing.quiet_steps` steps gets the next remedy.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tunewell.config.rules import Healing
from tunewell.records.events import EventLog
from tunewell.records.healing import HealingEntry
from tunewell.training.health import HealthFinding

_RISES = frozenset({"loss-spike", "lr-too-high"})
NOT_FINITE = frozenset({"nan-gradients", "mps-nan-fp16", "loss-scale-exhausted"})
_SPIKES_BEFORE_REWIND = 3
"""Number of updates skipped before a rewind. Spikes of up to three steps need no other remedy."""
_HALF = 0.5
_ZEROS = 3
"""Number of consecutive zero losses after which the health rule reports a finding."""


ANSWER_ADVICE = (
    "See `samples.jsonl` for all answers. Lower `train.learning_rate`, and check with `tunewell inspect` that only "
    "complete replies are supervised."
)


@dataclass
class MemoryLimits:
    """Limits on the tokens processed at once, set after out-of-memory errors."""

    micro_batch_tokens: int | None = None
    """Limit for every micro-batch; None as long as the planned size fits."""
    is_recomputing: bool = False
    evaluation_tokens: int | None = None
    answer_tokens: int | None = None
    num_shrunk: int = 0
    """Number of consecutive steps that needed smaller micro-batches."""

    def cap(self, planned: int) -> int:
        """Return the planned tokens per micro-batch, capped by the limit."""
        return planned if self.micro_batch_tokens is None else min(planned, self.micro_batch_tokens)


@dataclass
class HealingState:
    """The remedies in force in a run. Every entry is also written to `healing.jsonl`."""

    path: Path
    """The path of `healing.jsonl`, which is created with the first entry."""
    on_trouble: Callable[[str], None] | None = None
    entries: list[HealingEntry] = field(default_factory=list)
    quarantine: dict[int, int] = field(default_factory=dict)
    """Left-out document -> the step from which it is left out."""
    limits: MemoryLimits = field(default_factory=MemoryLimits)
    _log: EventLog | None = None

    def leave_out(self, documents: Iterable[int], *, since: int) -> None:
        """Leave documents out from a step on. An earlier step that was already set stays in force."""
        for document in list(documents):
            self.quarantine[document] = min(since, self.quarantine.get(document, since))

    def restore(self, entries: Iterable[HealingEntry]) -> None:
        """Apply the entries of an earlier process of this run."""
        self.entries = list(entries)
        for entry in self.entries:
            self._enforce(entry)

    def add(self, entry: HealingEntry) -> None:
        """Apply an entry and write it to disk."""
        self.entries.append(entry)
        self._enforce(entry)
        if self._log is None:
            self._log = EventLog(self.path, on_trouble=self.on_trouble)
        self._log.append(entry.as_json())
        if entry.action != "none":
            self._log.sync()

    def close(self) -> None:
        """Close `healing.jsonl` if it is open."""
        if self._log is not None:
            self._log.close()

    def _enforce(self, entry: HealingEntry) -> None:
        if entry.precision or entry.device:
            self.quarantine.clear()  # the precision or the device was the cause, not the documents
        if entry.rewound_to is not None:
            self.leave_out(self.quarantine, since=entry.rewound_to)
        self.leave_out(entry.documents, since=entry.since if entry.since is not None else entry.step)
        if entry.micro_batch_tokens is not None:
            self.limits.micro_batch_tokens = entry.micro_batch_tokens
        if entry.is_recomputing:
            self.limits.is_recomputing = True


@dataclass(frozen=True)
class RecoveryHistory:
    """The remedies that have been tried so far."""

    precision: str
    device: str
    rate_share: float = 1.0
    """Share of the planned learning rate."""
    was_halved: bool = False
    num_rewinds: int = 0
    num_not_finite: int = 0
    """Non-finite steps in this episode. An episode ends after `healing.quiet_steps` good steps."""
    num_spikes: int = 0
    first_bad: int = -1
    last_bad: int = -1

    def at(self, step: int, rules: Healing) -> "RecoveryHistory":
        """Return the history for a decision at this step, with its counts reset if the last episode is over."""
        is_over = self.last_bad >= 0 and step - self.last_bad > rules.quiet_steps
        return replace(self, num_not_finite=0, num_spikes=0, first_bad=-1, last_bad=-1) if is_over else self

    def after(self, entry: HealingEntry) -> "RecoveryHistory":
        """Return the history updated with an entry."""
        counts = entry.action in ("skip", "rewind", "stop") and not entry.is_explained
        is_bad = counts and entry.name in NOT_FINITE | _RISES
        return replace(
            self,
            first_bad=self.first_bad_with(entry.step) if is_bad else self.first_bad,
            last_bad=max(self.last_bad, entry.step) if is_bad else self.last_bad,
            num_not_finite=self.num_not_finite + (counts and entry.name in NOT_FINITE),
            num_spikes=self.num_spikes + (counts and entry.name in _RISES),
            num_rewinds=self.num_rewinds + (entry.action == "rewind"),
            rate_share=entry.rate_share or self.rate_share,
            was_halved=self.was_halved or entry.rate_share is not None,
            precision=entry.precision or self.precision,
            device=entry.device or self.device,
        )

    def first_bad_with(self, step: int) -> int:
        """Return the first bad step of this episode, given that `step` is bad too."""
        return step if self.first_bad < 0 else min(self.first_bad, step)

    def after_all(self, entries: Iterable[HealingEntry], rules: Healing) -> "RecoveryHistory":
        """Return the history updated with all entries of a resumed run."""
        history = self
        for entry in entries:
            history = history.at(entry.step, rules).after(entry)
        return history


@dataclass(frozen=True)
class Skip:
    """Skip the update."""

    finding: HealthFinding
    is_quarantining: bool
    """Whether to leave out the documents that caused the problem from now on."""


@dataclass(frozen=True)
class ShrinkMicroBatches:
    """Use smaller micro-batches from now on."""

    finding: HealthFinding


@dataclass(frozen=True)
class Rewind:
    """Rewind to a checkpoint and change a setting, so that the problem does not recur."""

    finding: HealthFinding
    not_after: int
    """The latest step that the checkpoint may have."""
    is_quarantining: bool
    or_later: bool = True
    """Whether to use the oldest checkpoint if all checkpoints are later."""
    rate_share: float | None = None
    precision: str | None = None
    device: str | None = None


@dataclass(frozen=True)
class Stop:
    """Stop the run, because no remedy is left."""

    finding: HealthFinding
    advice: str
    settings: tuple[str, ...] = ()
    """Settings with which a new run may succeed, like `train.learning_rate=0.001`."""


def decide(
    findings: Sequence[HealthFinding],
    history: RecoveryHistory,
    rules: Healing,
    *,
    are_weights_bad: bool = False,
    is_explained: bool = False,
) -> Skip | ShrinkMicroBatches | Rewind | Stop | None:
    """Return the action for the most severe finding, or None. `is_explained`: a few documents are the cause."""
    worst = next((finding for finding in findings if finding.severity != "note"), None)
    if worst is None:
        return None
    history = history.at(worst.step, rules)
    if worst.name == "zero-grad-no-learning":
        return Stop(worst, "Check that `method.targets` and `method.layers` select trainable layers.")
    if worst.name in NOT_FINITE:
        if not are_weights_bad and (history.num_not_finite == 0 or is_explained):
            return Skip(worst, is_quarantining=True)
        return _rewind_or_stop(worst, history, rules, is_quarantining=not are_weights_bad)
    if worst.name == "loss-zero-collapse":
        advice = "Check with `tunewell inspect` that rows have supervised tokens, and that the base model works."
        if history.num_rewinds or not rules.max_rewinds:
            return Stop(worst, advice)
        return Rewind(worst, worst.step - _ZEROS, is_quarantining=False)
    if worst.name == "loss-spike":
        if history.num_spikes < _SPIKES_BEFORE_REWIND:
            return Skip(worst, is_quarantining=False)
        return _rewind_or_stop(worst, history, rules, is_quarantining=True)
    if worst.name == "lr-too-high":
        return _diverged(worst, history, rules)
    if worst.name == "degenerate-answers" and rules.behaviour == "stop":
        return Stop(worst, ANSWER_ADVICE)
    return ShrinkMicroBatches(worst) if worst.name == "memory-spill" else None


def _diverged(finding: HealthFinding, history: RecoveryHistory, rules: Healing) -> Rewind | Stop:
    if history.num_rewinds >= rules.max_rewinds:
        rate = finding.numbers.get("learning_rate")
        if not isinstance(rate, float) or rate <= 0:
            return Stop(finding, "Lower `train.learning_rate`, or raise `train.warmup`.")
        lower = f"{rate / 10:.1g}"
        advice = f"Lower `train.learning_rate` to about {lower}, or raise `train.warmup`."
        return Stop(finding, advice, (f"train.learning_rate={lower}",))
    low_step, share = int(finding.numbers.get("low_step", 0)), history.rate_share * _HALF
    return Rewind(finding, low_step, is_quarantining=False, or_later=False, rate_share=share)


def _rewind_or_stop(
    finding: HealthFinding, history: RecoveryHistory, rules: Healing, *, is_quarantining: bool
) -> Rewind | Stop:
    """Return the next remedy: rewind without the documents, then half the rate, then fp32, then the CPU.

    The run rewinds to before the first bad step, so that skipped updates are repeated once the fault has passed.
    """
    advice = (
        "Lower `train.learning_rate`. If that does not help, see `healing.jsonl` for the documents and the tensor that "
        "went bad first: the data, the base model or the machine may be the cause."
    )
    if history.num_rewinds >= rules.max_rewinds:
        return Stop(finding, advice)
    basic = Rewind(finding, history.first_bad_with(finding.step) - 1, is_quarantining)
    if history.num_rewinds == 0:
        return basic
    if not history.was_halved:
        return replace(basic, rate_share=_HALF)
    # If the precision or the device is the cause, the learning rate and the documents are not.
    if finding.name in NOT_FINITE and history.precision != "fp32" and rules.change_precision:
        return replace(basic, precision="fp32", rate_share=1.0, is_quarantining=False)
    if finding.name in NOT_FINITE and history.device == "mps":
        return replace(basic, device="cpu", rate_share=1.0, is_quarantining=False)
    return Stop(finding, advice)
