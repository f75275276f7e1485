"""Find what slows a run down, the setting that changes it, and how much faster a step would be.

Each rule is a function of a profile. It returns a bottleneck if a setting removes at least a twentieth of the time.
Predictions are measured where that is possible: other thread counts and micro-batches were tried on the same documents.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

from tunewell.core.files import parse_json, read_bytes
from tunewell.core.units import count, duration, percent
from tunewell.features.profile.records import Profile, TriedSetting

_MIN_GAIN = 1.05
_EVALUATION_SHARE, _CHECKPOINT_SHARE = 0.05, 0.02
"""The share of the time that evaluations and checkpoints may take, for which an interval is chosen."""
_MIN_SAVE_STEPS = 10
_NEAR_BEST = 1.03
_COMPILE_SAVES = 0.3
"""Share of a step that compiled layers save, measured on an H200 (see `training/compile.py`)."""


@dataclass(frozen=True)
class Bottleneck:
    """A cause of lost time, and the setting that changes it."""

    name: str
    cause: str
    """The cause with its figures, the start of a sentence."""
    key: str
    value: int | str
    before_seconds: float
    """Seconds per step now, evaluations and checkpoints included."""
    after_seconds: float
    """Predicted seconds per step with the setting."""

    @property
    def gain(self) -> float:
        """How many times as fast the run would be."""
        return self.before_seconds / self.after_seconds

    @property
    def sentence(self) -> str:
        """The verdict: bottleneck, config line, predicted gain."""
        change = f"{duration(self.before_seconds)} to {duration(self.after_seconds)} per step"
        return f"{self.cause}: set `{self.key}: {self.value}`. Predicted: {change}, {self.gain:.2f} times as fast."

    def as_json(self) -> dict[str, Any]:
        """Return the bottleneck as `--json` prints it."""
        return {
            "name": self.name,
            "cause": self.cause,
            "key": self.key,
            "value": self.value,
            "seconds_before": self.before_seconds,
            "seconds_predicted": self.after_seconds,
            "gain_predicted": self.gain,
        }


def find_bottlenecks(profile: Profile) -> list[Bottleneck]:
    """Return all bottlenecks that a setting can change, the largest gain first."""
    found = [bottleneck for rule in _RULES for bottleneck in rule(profile) if bottleneck.gain >= _MIN_GAIN]
    return sorted(found, key=lambda bottleneck: -bottleneck.gain)


def verdict(profile: Profile) -> str:
    """Return one sentence: the largest bottleneck with its remedy, or that no setting would help much."""
    if found := find_bottlenecks(profile):
        return found[0].sentence
    parts = time_by_part(profile)
    name, seconds = max(parts.items(), key=lambda part: part[1])
    most = f"{percent(seconds / profile.total_seconds, 0)} of the time is {PARTS[name][1] if name in PARTS else name}"
    if profile.source == "run":
        return f"No setting of evaluations, checkpoints or data would make this run 5% faster: {most}."
    return f"No setting that was tried makes this run 5% faster: {most}."


PARTS: dict[str, list[str]] = parse_json(read_bytes(Path(__file__).with_name("parts.json")))
"""The name of each part in a table, and in a sentence."""


def time_by_part(profile: Profile) -> dict[str, float]:
    """Return the seconds per step of each part; they add up to the whole step.

    On a GPU the kernels count, and the time in which none runs is `idle`.
    """
    phases, kernels = dict(profile.phases), profile.kernels
    parts: dict[str, float] = {}
    if profile.is_gpu and kernels is not None:
        total, own = sum(kernels.seconds.values()) or 1.0, min(kernels.busy_seconds, profile.seconds)
        parts = {kind: seconds * own / total for kind, seconds in kernels.seconds.items()}
        parts["idle"] = max(0.0, profile.seconds - own)
    else:
        parts["log"] = phases.pop("log", 0.0) + phases.pop("health", 0.0)
        if profile.is_gpu:
            parts["launch"] = phases.pop("forward", 0.0) + phases.pop("backward", 0.0)
        parts |= phases if profile.phases else {"steps": profile.seconds}
    parts["evaluation"], parts["checkpoint"] = profile.evaluation_seconds, profile.checkpoint_seconds
    return {name: seconds for name, seconds in parts.items() if seconds > 0}


def covered_share(profile: Profile) -> float | None:
    """Return the share of the time that has a name; None for a run that recorded no phases."""
    if not profile.phases:
        return None
    return 1 - profile.phases.get("other", 0.0) / profile.total_seconds


def _share(profile: Profile, seconds: float) -> str:
    return percent(seconds / profile.total_seconds, 0)


def _evaluations(profile: Profile) -> Iterator[Bottleneck]:
    evaluation, own = profile.evaluation, profile.evaluation_seconds
    if evaluation is None or not own:
        return
    every = min(profile.num_steps, ceil(evaluation.seconds / (_EVALUATION_SHARE * profile.seconds)))
    if every <= evaluation.every:
        return
    later = evaluation.seconds * (1 + ceil(profile.num_steps / every)) / profile.num_steps
    yield Bottleneck(
        "evaluation",
        f"Evaluations take {_share(profile, own)} of the time ({duration(evaluation.seconds)} every "
        f"{count(evaluation.every, 'step')})",
        "evaluate.every_steps",
        every,
        profile.total_seconds,
        profile.total_seconds - own + later,
    )


def _checkpoints(profile: Profile) -> Iterator[Bottleneck]:
    checkpoint, own = profile.checkpoint, profile.checkpoint_seconds
    if checkpoint is None or not own:
        return
    # A checkpoint is written in the background, which also slows the steps down.
    passes = profile.phases.get("forward", 0.0) + profile.phases.get("backward", 0.0)
    is_always_writing = checkpoint.queue_seconds > 0 and profile.compute_seconds is not None
    slowed = max(0.0, passes - (profile.compute_seconds or 0.0)) if is_always_writing else 0.0
    written = (checkpoint.seconds + checkpoint.queue_seconds * checkpoint.every) / profile.seconds
    every = max(_MIN_SAVE_STEPS, ceil(checkpoint.seconds / (_CHECKPOINT_SHARE * profile.seconds)), ceil(written) + 1)
    every = min(every, profile.num_steps)
    if every <= checkpoint.every:
        return
    later = checkpoint.seconds * ceil(profile.num_steps / every) / profile.num_steps
    later += slowed * min(1.0, (1 + written) / every)
    yield Bottleneck(
        "checkpoint",
        f"Checkpoints take {_share(profile, own + slowed)} of the time (every {count(checkpoint.every, 'step')})",
        "checkpoints.every_steps",
        every,
        profile.total_seconds,
        profile.total_seconds - own - slowed + later,
    )


def _data(profile: Profile) -> Iterator[Bottleneck]:
    own, ahead = profile.phases.get("data", 0.0), profile.reading.ahead_seconds
    if profile.settings.get("train.read_ahead") == "false" and (ahead or profile.source == "run"):
        # Without a measurement, one reader takes as long as before.
        hidden = max(profile.seconds - own, own if ahead is None else ahead) - (profile.seconds - own)
        cause = f"Reading documents takes {_share(profile, own)} of the time"
        after = profile.total_seconds - own + hidden
        yield Bottleneck("data", cause, "train.read_ahead", "true", profile.total_seconds, after)


def _trial(
    name: str, key: str, cause: Callable[[Profile, TriedSetting], str]
) -> Callable[[Profile], Iterator[Bottleneck]]:
    """Return a rule that takes the smallest value whose time is within 3% of the best."""

    def rule(profile: Profile) -> Iterator[Bottleneck]:
        tried = [trial for trial in profile.trials if trial.key == key]
        best = min((trial.ratio for trial in tried), default=1.0)
        near = [trial for trial in tried if trial.ratio <= _NEAR_BEST * best]
        if not near or best >= 1:
            return
        trial = min(near, key=lambda trial: trial.value if isinstance(trial.value, int) else 0)
        own = profile.phases.get("forward", 0.0) + profile.phases.get("backward", 0.0)
        if key == "train.threads":
            own += profile.phases.get("optimizer", 0.0) + profile.evaluation_seconds
        after = profile.total_seconds - own * (1 - trial.ratio)
        yield Bottleneck(name, cause(profile, trial), key, trial.value, profile.total_seconds, after)

    return rule


def _threads_cause(profile: Profile, trial: TriedSetting) -> str:
    times = trial.present_seconds / trial.seconds
    return f"A step takes {times:.1f} times as long with {count(profile.threads, 'thread')} as with {trial.value}"


def _micro_batch_cause(profile: Profile, trial: TriedSetting) -> str:
    number = count(round(profile.micro_batches or 1), "micro-batch", "micro-batches")
    return f"A step is computed in {number} of at most {count(profile.micro_batch_tokens)} tokens"


def _recompute_cause(profile: Profile, trial: TriedSetting) -> str:
    return f"Recomputing activations takes {percent(1 - trial.ratio, 0)} of the forward and backward passes"


def _compile(profile: Profile) -> Iterator[Bottleneck]:
    if profile.is_gpu and profile.settings.get("train.compile") == "off" and profile.kernels is not None:
        idle = time_by_part(profile).get("idle", 0.0)
        after = profile.total_seconds - _COMPILE_SAVES * profile.seconds
        cause = f"Layers are not compiled, and the GPU is idle {_share(profile, idle)} of the time"
        yield Bottleneck("compile", cause, "train.compile", "auto", profile.total_seconds, after)


_RULES: tuple[Callable[[Profile], Iterator[Bottleneck]], ...] = (
    _evaluations,
    _checkpoints,
    _data,
    _trial("threads", "train.threads", _threads_cause),
    _trial("micro-batch", "train.micro_batch_tokens", _micro_batch_cause),
    _trial("recompute", "train.recompute", _recompute_cause),
    _compile,
)


@dataclass(frozen=True)
class ProfileResult:
    """A profile with its verdict and, after `--apply`, the profile with the remedy."""

    profile: Profile
    bottlenecks: list[Bottleneck] = field(default_factory=list[Bottleneck])
    applied: Profile | None = None

    @property
    def sentence(self) -> str:
        return verdict(self.profile)

    @property
    def measured_gain(self) -> float | None:
        """How many times as fast the run is with the remedy."""
        return None if self.applied is None else self.profile.total_seconds / self.applied.total_seconds

    def as_json(self) -> dict[str, Any]:
        """Return the object that `profile --json` prints."""
        shown = self.profile.model_dump(mode="json") | {
            "parts": time_by_part(self.profile),
            "total_seconds": self.profile.total_seconds,
            "tokens_per_second": self.profile.tokens / self.profile.total_seconds,
        }
        payload: dict[str, Any] = {
            "verdict": self.sentence,
            "bottlenecks": [bottleneck.as_json() for bottleneck in self.bottlenecks],
            "profile": shown,
        }
        if self.applied is not None:
            payload["applied"] = {
                "gain_measured": self.measured_gain,
                "seconds_measured": self.applied.total_seconds,
                "profile": self.applied.model_dump(mode="json"),
            }
        return payload
