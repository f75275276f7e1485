"""What is known of a run's steps in plain numbers, and what can be found in them."""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from tunewell.records.healing import Severity

WINDOW = 128
"""Steps that a step is compared with."""
LARGEST_VOCABULARY = 262_144
"""Of models that are widely used: what guessing costs at most."""


@dataclass(frozen=True)
class StepMetrics:
    """The numbers of one step, or of one line of another trainer's log; None is what was not told."""

    step: int
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    seconds: float | None = None
    tokens: int | None = None
    supervised_tokens: int | None = None
    memory_bytes: int | None = None
    scale: float | None = None
    """The scaler's factor, under fp16."""
    was_skipped: bool = False
    norm_limit: float | None = None
    """The length above which the step's gradient was not used."""
    held_out_loss: float | None = None
    """Of a look at held-out rows; then all others are None."""

    @property
    def is_finite(self) -> bool:
        """Whether every number it tells is one."""
        return all(value is None or math.isfinite(value) for value in (self.loss, self.grad_norm))

    @property
    def is_quiet(self) -> bool:
        """Whether it was an ordinary step."""
        return self.is_finite and not self.was_skipped


@dataclass(frozen=True)
class RunContext:
    """What is known of a run beside its numbers."""

    vocab_size: int | None = None
    precision: str | None = None
    device: str | None = None
    max_grad_norm: float | None = None
    device_bytes: int | None = None
    """All memory of the device, where it is not the host's."""
    spike_factor: float = 10.0
    is_from_scratch: bool = False
    """Whether the model began with random weights, which may lose anything at first."""
    is_raw: bool = True
    """Whether losses are as they were computed; Hugging Face's trainer shows NaN as the mean of what was before."""

    @property
    def guessing(self) -> float:
        """What a model loses that guesses among all tokens alike."""
        return math.log(self.vocab_size or LARGEST_VOCABULARY)


@dataclass(frozen=True)
class Finding:
    """Something that was seen."""

    name: str
    severity: Severity
    step: int
    words: str
    numbers: dict[str, Any] = field(default_factory=dict)


@dataclass
class History:
    """What is remembered of earlier steps."""

    first: StepMetrics | None = None
    recent: deque[StepMetrics] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Ordinary steps, newest last."""
    lows: float = math.inf
    """The lowest median loss of eight steps so far."""
    low_step: int = 0
    beginning: list[float] = field(default_factory=list)
    """The first losses."""
    held_out: list[tuple[int, float]] = field(default_factory=list)
    bad_in_a_row: int = 0
    zero_norms_in_a_row: int = 0
    zero_losses_in_a_row: int = 0
    said: set[str] = field(default_factory=set)
    """What was said and would only be repeated."""

    def norms(self) -> list[float]:
        return [r.grad_norm for r in self.recent if r.grad_norm is not None and r.grad_norm > 0]

    def losses(self, last: int = WINDOW) -> list[float]:
        return [r.loss for r in list(self.recent)[-last:] if r.loss is not None]
