"""Read the clock at a run's marks, and write down what a contender in a process of its own has measured."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

RESULT = "RESULT "
"""Begins the one line of a contender's output that its parent reads."""


@dataclass
class Clock:
    """Reads the time and the tokens so far after the steps given, and after the first one."""

    marks: list[int]
    started_at: float
    """When the process was asked for, in `time.time()`."""
    is_waiting: bool = True
    """Whether a step may still be under way on the GPU when it is told of, and must be waited for."""
    called_at: float = 0.0
    first_step_seconds: float = 0.0
    call_seconds: float = 0.0
    readings: list[tuple[float, int]] = field(default_factory=list)
    _paused: float = 0.0

    def call(self) -> None:
        """Begin: everything is imported and the model is on its device."""
        self.called_at = time.time()

    def step(self, step: int, tokens: int) -> None:
        """Take note of a finished step, and of the tokens trained on so far."""
        if self.is_waiting and (step == 1 or step in self.marks):
            _wait_for_device()
        if step == 1:
            self.first_step_seconds = time.time() - self.started_at
            self.call_seconds = time.time() - self.called_at
        if step in self.marks:
            self.readings.append((time.perf_counter() - self._paused, tokens))

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Do not count what is done meanwhile."""
        begun = time.perf_counter()
        yield
        self._paused += time.perf_counter() - begun

    @property
    def rates(self) -> list[float]:
        """Return the tokens per second of each window."""
        pairs = zip(self.readings, self.readings[1:], strict=False)
        return [(tokens - before) / (now - then) for (then, before), (now, tokens) in pairs]

    def peak(self) -> dict[str, float]:
        """Return the peak of allocated GPU memory, and of memory that torch reserved, idle or in graphs."""
        import torch

        if not torch.cuda.is_available():
            return {"peak_gib": 0.0, "held_gib": 0.0}
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return {"peak_gib": peaks[0] / 2**30, "held_gib": peaks[1] / 2**30}

    def report(self, **more: Any) -> None:
        """Print what was measured, for the parent."""
        own = {
            "tokens_per_second": self.rates,
            "first_step_seconds": self.first_step_seconds,
            "call_seconds": self.call_seconds,
        }
        print(RESULT + json.dumps(own | self.peak() | more), flush=True)


@dataclass
class Marks:
    """A listener of tunewell's engine that reads the clock, and calls `at_mark` at the marks."""

    clock: Clock
    at_mark: Callable[[], None] = lambda: None
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tokens: int = 0

    def __call__(self, event: Any) -> None:
        """Count a step when its numbers have come from the device; keep notes, and what had to be healed."""
        from tunewell.training.events import Healed, Note, StepTaken

        match event:
            case StepTaken():
                self._count(event)
            case Note(message):
                self.notes.append(message)
            case Healed(entry):  # a run that had to be healed is not to be timed
                self.notes.append(f"healed: {entry.words}")

    def _count(self, event: Any) -> None:
        self.tokens += event.tokens
        self.losses.append(event.loss)
        self.grad_norms.append(event.grad_norm)
        self.clock.step(event.step, self.tokens)
        if event.step in self.clock.marks:
            self.at_mark()


def _wait_for_device() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
