"""What to do about what was found: a pure function of the findings, of what was done before, and of the rules.

    bad documents leave the update and these documents out, each time, as long as they are few
    not finite    leave the update out -> rewind without the step's documents -> half the rate -> fp32 -> CPU -> stop
    spike         leave the update out -> rewind without the documents -> half the rate -> stop
    divergence    rewind to before it with half the rate, as often as rewinds are allowed -> stop
    loss of 0     rewind to before it, once -> stop
    no gradient   stop

Each remedy is tried once: the next trouble within some good steps is met with the next one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tunewell.config.rules import Healing
from tunewell.records.healing import HealingEntry
from tunewell.training.metrics import Finding

_RISES = frozenset({"loss-spike", "lr-too-high"})
NOT_FINITE = frozenset({"nan-gradients", "mps-nan-fp16", "loss-scale-exhausted"})
_SPIKES_BEFORE_REWIND = 3
"""Updates left out before a run goes back: a gradient a hundred times too long for three steps needs no more."""
_HALF = 0.5
_ZEROS = 3
"""Losses of 0 that were seen in a row before it was said."""


@dataclass(frozen=True)
class Past:
    """What was done so far."""

    precision: str
    device: str
    """`cpu`, `cuda` or `mps`."""
    rate_share: float = 1.0
    was_halved: bool = False
    """Whether a lower rate was tried."""
    num_rewinds: int = 0
    strikes: int = 0
    """Steps that were not finite, with fewer good steps between them than end an episode."""
    spikes: int = 0
    first_bad: int = -1
    """The step at which the first of these was."""
    last_bad: int = -1
    """The step at which the newest was."""

    def at(self, step: int, rules: Healing) -> "Past":
        """Forget an episode that is over."""
        is_over = self.last_bad >= 0 and step - self.last_bad > rules.quiet_steps
        return replace(self, strikes=0, spikes=0, first_bad=-1, last_bad=-1) if is_over else self

    def after(self, entry: HealingEntry) -> "Past":
        """Remember what was done about a finding."""
        past, is_struck = self, entry.action in ("skip", "rewind", "stop") and not entry.is_explained
        if is_struck and entry.name in NOT_FINITE | _RISES:
            first = entry.step if past.first_bad < 0 else min(past.first_bad, entry.step)
            past = replace(past, first_bad=first, last_bad=max(past.last_bad, entry.step))
        if is_struck and entry.name in NOT_FINITE:
            past = replace(past, strikes=past.strikes + 1)
        elif is_struck and entry.name in _RISES:
            past = replace(past, spikes=past.spikes + 1)
        if entry.action == "rewind":
            past = replace(past, num_rewinds=past.num_rewinds + 1)
        return replace(
            past,
            rate_share=entry.rate_share or past.rate_share,
            was_halved=past.was_halved or entry.rate_share is not None,
            precision=entry.precision or past.precision,
            device=entry.device or past.device,
        )


def remembered(entries: Iterable[HealingEntry], start: Past, rules: Healing) -> Past:
    """Give what was done in a run that goes on."""
    past = start
    for entry in entries:
        past = past.at(entry.step, rules).after(entry)
    return past


@dataclass(frozen=True)
class CarryOn:
    """There is nothing to do."""


@dataclass(frozen=True)
class Skip:
    """The update was left out, which is enough."""

    finding: Finding
    is_quarantining: bool
    """Whether the documents that caused it are left out from now on."""


@dataclass(frozen=True)
class Split:
    """Compute fewer tokens at once from now on."""

    finding: Finding


@dataclass(frozen=True)
class Rewind:
    """Go back to a checkpoint, and change something, or the same would happen again."""

    finding: Finding
    not_after: int
    """Finished steps that a checkpoint may have at most."""
    is_quarantining: bool
    or_later: bool = True
    """Whether the oldest checkpoint will do where all are later."""
    rate_share: float | None = None
    precision: str | None = None
    device: str | None = None


@dataclass(frozen=True)
class Stop:
    """Nothing that may be tried is left."""

    finding: Finding
    advice: str


Action = CarryOn | Skip | Split | Rewind | Stop


def decide(
    findings: Sequence[Finding],
    past: Past,
    rules: Healing,
    *,
    are_weights_bad: bool = False,
    is_explained: bool = False,
) -> Action:
    """Answer the worst of what a step showed.

    `are_weights_bad` where a weight itself is not finite, `is_explained` where few documents are all that is wrong.
    """
    acted = next((finding for finding in findings if finding.severity != "note"), None)
    if acted is None:
        return CarryOn()
    past = past.at(acted.step, rules)
    if acted.name == "zero-grad-no-learning":
        return Stop(acted, "check that what should be trained is not frozen (`method.targets`, `method.layers`)")
    if acted.name in NOT_FINITE:
        if not are_weights_bad and (past.strikes == 0 or is_explained):
            return Skip(acted, is_quarantining=True)
        return _go_back(acted, past, rules, is_quarantining=not are_weights_bad)
    if acted.name == "loss-zero-collapse":
        advice = "check that the labels are not all masked, and that the base model answers at all"
        if past.num_rewinds or not rules.max_rewinds:
            return Stop(acted, advice)
        return Rewind(acted, acted.step - _ZEROS, is_quarantining=False)
    if acted.name == "loss-spike":
        if past.spikes < _SPIKES_BEFORE_REWIND:
            return Skip(acted, is_quarantining=False)
        return _go_back(acted, past, rules, is_quarantining=True)
    if acted.name == "lr-too-high":
        low_step = int(acted.numbers.get("low_step", 0))
        return _diverged(acted, past, rules, not_after=low_step)
    return Split(acted) if acted.name == "memory-spill" else CarryOn()


def _diverged(finding: Finding, past: Past, rules: Healing, *, not_after: int) -> Rewind | Stop:
    if past.num_rewinds >= rules.max_rewinds:
        rate = finding.numbers.get("learning_rate")
        tenth = f", for example {rate / 10:.1g}" if isinstance(rate, float) and rate > 0 else ""
        return Stop(finding, f"lower `train.learning_rate`{tenth}, or raise `train.warmup`")
    share = past.rate_share * _HALF
    return Rewind(finding, not_after, is_quarantining=False, or_later=False, rate_share=share)


def _go_back(finding: Finding, past: Past, rules: Healing, *, is_quarantining: bool) -> Rewind | Stop:
    """Take the next remedy: the same run without the documents, half the rate, fp32, another device.

    From before the first bad step: an update that was left out for a fault that has passed is made after all.
    """
    advice = (
        "the data, the base model, the learning rate or the machine is at fault: see the documents and the place in "
        "`healing.jsonl`, and try a lower `train.learning_rate`"
    )
    if past.num_rewinds >= rules.max_rewinds:
        return Stop(finding, advice)
    first = finding.step if past.first_bad < 0 else min(past.first_bad, finding.step)
    plain = Rewind(finding, first - 1, is_quarantining)
    if past.num_rewinds == 0:
        return plain
    if not past.was_halved:
        return replace(plain, rate_share=_HALF)
    # Where another way of computing is the cure, neither the rate nor the documents were at fault.
    if finding.name in NOT_FINITE and past.precision != "fp32" and rules.change_precision:
        return replace(plain, precision="fp32", rate_share=1.0, is_quarantining=False)
    if finding.name in NOT_FINITE and past.device == "mps":
        return replace(plain, device="cpu", rate_share=1.0, is_quarantining=False)
    return Stop(finding, advice)
