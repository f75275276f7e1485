"""The events of a training run (step, evaluation, healing, note, progress), and the listener that receives them."""

from collections.abc import Callable
from dataclasses import dataclass, field

from tunewell.core.progress import Progress
from tunewell.records.healing import HealingEntry
from tunewell.records.plan import Plan


@dataclass(frozen=True)
class RunStarted:
    """The first step is about to be taken."""

    plan: Plan
    num_trainable: int
    num_parameters: int
    first_step: int
    """0 for a new run, the number of finished steps for a resumed one."""


@dataclass(frozen=True)
class StepTaken:
    """The metrics of one optimizer step: raw numbers, not smoothed; NaN and infinity stay. They come one step late."""

    step: int
    """Counted from 1."""
    epoch: float
    """Passes over the corpus after this step."""
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
    """Peak memory so far: of the device, or of this process on the CPU."""
    batch_sha256: str
    """Hash of the step's document ids, in order. Equal runs have equal hashes."""
    was_skipped: bool = False
    """The update was left out because the loss or the gradient was not finite."""
    scale: float | None = None
    """The loss scaler's factor, under fp16."""


@dataclass(frozen=True)
class Sample:
    """A held-out question, the model's answer at this step, and the reference answer."""

    step: int
    document: int
    prompt: str
    """The whole prompt, with its markers."""
    question: str
    """The part of the prompt that differs between the samples."""
    answer: str
    reference: str
    ended: bool
    """Whether the answer ended by itself within the token limit."""


@dataclass(frozen=True)
class Evaluated:
    """One evaluation on the held-out rows."""

    step: int
    loss: float
    tokens: int
    documents: int
    seconds: float
    is_best: bool
    samples: list[Sample] = field(default_factory=list)


@dataclass(frozen=True)
class Healed:
    """Something went wrong; the entry says what, and what was done about it."""

    entry: HealingEntry


@dataclass(frozen=True)
class Rewound:
    """The run went back to a checkpoint: the steps after this one are taken again."""

    step: int


@dataclass(frozen=True)
class Note:
    """One plain line that the user should read."""

    message: str


Event = RunStarted | StepTaken | Evaluated | Healed | Rewound | Note | Progress
"""`Progress` says that something longer than a step began: loading, preparing, checking, saving."""

Listener = Callable[[Event], None]
"""Receives every event of a run. It returns at once and never raises; notes may come from another thread."""


def send_notes(listener: Listener) -> Callable[[str], None]:
    """Return a function that sends a line to a listener as a note."""
    return lambda message: listener(Note(message))
