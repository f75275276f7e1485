"""The events of a training run (step, evaluation, healing, note, progress), and the listener that receives them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tunewell.core.progress import Progress
from tunewell.core.units import count
from tunewell.records.healing import HealingEntry
from tunewell.records.plan import Plan
from tunewell.records.report import Fault


@dataclass(frozen=True)
class CheckedItem:
    """One line of the check list before the first step: `memory`, `20.1 GiB of 23.5 GiB were free`."""

    name: str
    value: str
    state: Literal["ok", "warn", "unknown"] = "ok"


@dataclass(frozen=True)
class RunStarted:
    """The event sent before the first step."""

    plan: Plan
    num_trainable: int
    num_parameters: int
    first_step: int
    """0 for a new run, or the number of finished steps for a resumed run."""
    checklist: Sequence[CheckedItem] = ()


@dataclass(frozen=True)
class StepTaken:
    """The raw metrics of one optimizer step, including NaN and infinity. On CUDA they arrive one step late."""

    step: int
    """Counted from 1."""
    epoch: float
    """Number of passes over the corpus after this step."""
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
    """Peak memory so far, of the GPU or, on the CPU, of this process."""
    batch_sha256: str
    """Hash of the step's document ids, in order. Identical runs have identical hashes."""
    was_skipped: bool = False
    """Whether the update was skipped because of a non-finite loss or gradient, or a spike in the gradient norm."""
    scale: float | None = None
    """The loss scale in fp16; None in other precisions."""
    micro_batches: int | None = None
    """Number of micro-batches, over all ranks."""
    computed_tokens: int | None = None
    """Tokens that this rank computed since the last event: with padding, but a shared prefix only once."""
    phases: dict[str, float] | None = None
    """Seconds of each phase since the last event (see `training/step.py`), with evaluations and checkpoints."""


@dataclass(frozen=True)
class Sample:
    """A held-out question, the model's answer at this step, and the reference answer."""

    step: int
    document: int
    prompt: str
    """The full prompt, with chat markers."""
    question: str
    """The last message of the user before the reply."""
    answer: str
    reference: str
    ended: bool
    """Whether the answer ended with a stop token within the token limit."""
    right: bool | None = None
    """Whether the answer is right; None if the task has no measure."""
    fault: Fault | None = None
    """Why the answer is degenerate: it is empty, loops or repeats the question. None if it is not."""


@dataclass(frozen=True)
class Evaluated:
    """One evaluation, on the selection slice or, without one, on the held-out rows."""

    step: int
    loss: float
    tokens: int
    documents: int
    seconds: float
    is_best: bool
    samples: list[Sample] = field(default_factory=list)
    are_degenerate: bool | None = None
    """Whether all sample answers are empty, loop or repeat the question, or at least half of them and two more than
    at step 0; None if there are fewer than two."""
    num_faulty: int = 0
    """Number of sample answers that are empty, loop or repeat the question."""
    right: int | None = None
    """Number of right answers to questions of the selection slice; None if the task has no measure."""
    judged: int | None = None

    @property
    def right_words(self) -> str:
        """The number of right answers: `61 of 75 right`; empty without a measure."""
        return "" if self.right is None else f"{count(self.right)} of {count(self.judged or 0)} right"


@dataclass(frozen=True)
class Healed:
    """A problem with the run, and the action taken, as recorded in `entry`."""

    entry: HealingEntry


@dataclass(frozen=True)
class Rewound:
    """The run was rewound to a checkpoint; the steps after `step` are repeated."""

    step: int


@dataclass(frozen=True)
class Note:
    """One line of text for the user."""

    message: str
    is_passing: bool = False
    """Whether the note is out of date at the end of the run."""


Event = RunStarted | StepTaken | Evaluated | Healed | Rewound | Note | Progress
"""`Progress` marks the start of longer work: loading, preparing, checking, saving."""

Listener = Callable[[Event], None]
"""Receives every event of a run. It must return quickly and not raise; notes may come from another thread."""


def send_notes(listener: Listener) -> Callable[[str], None]:
    """Return a function that sends a message to a listener as a note."""
    return lambda message: listener(Note(message))
