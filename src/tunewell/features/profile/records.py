"""A profile: where the time of a step goes, as measured in some steps or read from the events of a run."""

from typing import Literal

from pydantic import Field

from tunewell.records.base import Record


class Rare(Record):
    """Work that is done once in many steps: an evaluation or a checkpoint."""

    seconds: float
    """Seconds for which training waits, each time."""
    number: int
    """How often in the whole run."""
    every: int
    """Steps between two of them."""
    number_measured: int = 0
    queue_seconds: float = 0.0
    """Seconds per step spent waiting until the previous checkpoint is written."""
    answers_seconds: float = 0.0
    """The part of `seconds` in which held-out questions are answered."""


class TriedSetting(Record):
    """Another value of a setting, tried on the same documents in turn with the present value."""

    key: str
    value: int | str
    seconds: float
    """Seconds of the forward and backward pass."""
    present_seconds: float
    """Seconds with the present value."""

    @property
    def ratio(self) -> float:
        return self.seconds / self.present_seconds


class Kernels(Record):
    """The time of a GPU's kernels in a step, from a trace of torch's profiler."""

    seconds: dict[str, float]
    """Seconds per step by kind: matmul, attention, pointwise, optimizer, copy."""
    busy_seconds: float
    """Seconds per step in which a kernel runs."""


class ReadTimes(Record):
    """The time to read the documents of a step in another way; None if it was not measured."""

    ahead_seconds: float | None = None
    """With the threads of `train.read_ahead`."""


class Profile(Record):
    """Where the time of a step goes. All seconds are per optimizer step unless stated otherwise."""

    format: str = "tunewell-profile"
    format_version: int = 1
    made_by: str
    source: Literal["steps", "run"]
    """Measured in some steps, or read from the events of a run."""
    model: str
    method: str
    device: str
    is_gpu: bool
    precision: str
    threads: int
    micro_batch_tokens: int
    compile: str = "off"
    """`on` if the layers were compiled; `off` or `auto` if they were not."""
    num_steps: int
    """Steps of the whole run."""
    num_measured: int
    """Steps that were measured."""
    tokens: float
    """Tokens of the documents."""
    computed_tokens: float | None = None
    """Tokens that were computed, with padding; None if the run did not record it."""
    micro_batches: float | None = None
    phases: dict[str, float]
    """Seconds by phase, without evaluations and checkpoints."""
    seconds: float
    """Seconds of a step, without evaluations and checkpoints."""
    evaluation: Rare | None = None
    checkpoint: Rare | None = None
    kernels: Kernels | None = None
    compute_seconds: float | None = None
    """Forward and backward pass of a step while no checkpoint is written; `phases` may be slower."""
    trials: list[TriedSetting] = Field(default_factory=list[TriedSetting])
    reading: ReadTimes = ReadTimes()
    settings: dict[str, int | str] = Field(default_factory=dict[str, int | str])
    """Present values of the settings that a fix may change, by key."""
    notes: list[str] = Field(default_factory=list[str])

    @property
    def evaluation_seconds(self) -> float:
        """Seconds per step for evaluations."""
        return self.evaluation.seconds * self.evaluation.number / self.num_steps if self.evaluation else 0.0

    @property
    def checkpoint_seconds(self) -> float:
        """Seconds per step for checkpoints."""
        if self.checkpoint is None:
            return 0.0
        return self.checkpoint.seconds * self.checkpoint.number / self.num_steps + self.checkpoint.queue_seconds

    @property
    def total_seconds(self) -> float:
        """Seconds of a step with its share of the evaluations and checkpoints."""
        return self.seconds + self.evaluation_seconds + self.checkpoint_seconds
