"""Write one event per step, as soon as the step's numbers can be read without waiting for them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tunewell.data.batches import Step
from tunewell.hardware.probe import memory_in_use
from tunewell.training.events import StepTaken
from tunewell.training.run import Run
from tunewell.training.step import StepResult


@dataclass(frozen=True)
class StepRecord:
    """A step that was taken; its numbers may not have been read yet."""

    step: Step
    groups: Sequence[np.ndarray]
    """Its documents, micro-batch by micro-batch."""
    numbers: StepResult
    rate: float
    norm_limit: float
    tokens: int
    supervised: int


Reader = Callable[[StepRecord, StepTaken], None]
"""Is told every step with its numbers."""


class StepLog:
    """Reads the numbers of a step once the next is under way; on a device without a queue, at once."""

    def __init__(self, run: Run, *, reader: Reader) -> None:
        self._run, self._reader = run, reader
        self._late: StepRecord | None = None
        self._clock = time.perf_counter()
        self.last_seconds = 0.0

    def take(self, taken: StepRecord) -> None:
        """Remember a step, and write the one before it; on a device without a queue, write it at once."""
        before, self._late = self._late, taken
        if before is not None:
            self._write(before)
        if taken.numbers.arrived is None:
            self.flush()

    def flush(self) -> None:
        """Wait for the last step's numbers and write them."""
        if self._late is not None:
            late, self._late = self._late, None
            self._write(late)

    def forget(self) -> None:
        """Leave the last step unread: the run goes back to before it."""
        self._late = None

    def restart_clock(self) -> None:
        """Do not count what was done since the last step."""
        self._clock = time.perf_counter()

    def _write(self, taken: StepRecord) -> None:
        loss, norm, was_skipped, scale = taken.numbers.read()
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        self.last_seconds = seconds
        self._run.seconds["train"] += seconds
        learner = self._run.learner
        event = StepTaken(
            step=taken.step.number + 1,
            epoch=round(taken.step.seen, 6),
            loss=loss,
            grad_norm=norm,
            learning_rate=taken.rate,
            tokens=taken.tokens,
            supervised_tokens=taken.supervised,
            documents=len(taken.step.documents),
            seconds=round(seconds, 6),
            memory_bytes=memory_in_use(learner.device),
            batch_sha256=taken.step.sha256,
            was_skipped=was_skipped,
            scale=scale if learner.scaler.is_on else None,
        )
        if learner.world.is_first:
            self._run.events.append({"kind": "step", **event.__dict__})
        self._run.listener(event)
        self._reader(taken, event)
