"""What a run tells whoever watches it: one event per step, one per look at the held-out rows, and plain notes."""

from dataclasses import dataclass, field
from typing import Protocol

from tunewell.records.healing import HealingEntry
from tunewell.records.plan import Plan


@dataclass(frozen=True)
class StepEvent:
    """One optimizer step, in raw numbers: nothing is smoothed, and what is not finite stays so."""

    step: int
    """Counted from 1."""
    epoch: float
    """How much of the corpus has been seen after this step."""
    loss: float
    """Mean over the step's supervised tokens."""
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    tokens: int
    supervised_tokens: int
    documents: int
    seconds: float
    memory_bytes: int | None
    """Peak of the device's memory so far; of this process on the CPU."""
    batch_sha256: str
    """Of the ids of the step's documents, in order: equal runs have equal ones."""
    was_skipped: bool = False
    """The update was not made because a number was not finite."""
    scale: float | None = None
    """The scaler's factor, under fp16."""


@dataclass(frozen=True)
class HeldOutEvent:
    """One look at the held-out rows."""

    step: int
    loss: float
    tokens: int
    documents: int
    seconds: float
    is_best: bool


@dataclass(frozen=True)
class Sample:
    """A held-out question, what the model says to it now, and what it should say."""

    step: int
    document: int
    prompt: str
    """As the model reads it, markers and all."""
    question: str
    """What is particular to this prompt."""
    answer: str
    reference: str
    ended: bool
    """Whether the answer ended by itself within the limit."""


@dataclass(frozen=True)
class Start:
    """What is known when the first step is about to be taken."""

    plan: Plan
    num_trainable: int
    num_parameters: int
    first_step: int
    """0 for a new run, the number of finished steps for a resumed one."""
    notes: list[str] = field(default_factory=list)


class Watcher(Protocol):
    """Sees a run go by. Every method returns at once; none may raise."""

    def doing(self, stage: str) -> None:
        """Say that something longer than a step begins: loading, preparing, checking, saving."""

    def begun(self, start: Start) -> None:
        """Say that the first step is about to be taken."""

    def stepped(self, event: StepEvent) -> None:
        """Give the numbers of a step; they come one step late."""

    def looked(self, event: HeldOutEvent, samples: list[Sample]) -> None:
        """Give the held-out loss, and answers where some were asked for."""

    def healed(self, entry: HealingEntry) -> None:
        """Say what went wrong and what was done about it."""

    def rewound(self, step: int) -> None:
        """Say that the run went back: what was after this step is taken again."""

    def noted(self, message: str) -> None:
        """Say something that a person should know, in one plain line."""


class Unwatched:
    """A watcher that looks away."""

    def doing(self, stage: str) -> None:
        """Ignore it."""

    def begun(self, start: Start) -> None:
        """Ignore it."""

    def stepped(self, event: StepEvent) -> None:
        """Ignore it."""

    def looked(self, event: HeldOutEvent, samples: list[Sample]) -> None:
        """Ignore it."""

    def healed(self, entry: HealingEntry) -> None:
        """Ignore it."""

    def rewound(self, step: int) -> None:
        """Ignore it."""

    def noted(self, message: str) -> None:
        """Ignore it."""
