"""The result of a run (`train --json`), and the listener that collects its numbers."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunewell.records.events import plain
from tunewell.records.healing import HealingEntry
from tunewell.records.outcome import Status
from tunewell.records.report import Validation
from tunewell.training.events import Evaluated, Event, Healed, Listener, Note, Rewound, StepTaken


@dataclass(frozen=True)
class TrainResult:
    """What a run came to."""

    run: Path
    status: Status
    reason: str
    exit_code: int
    steps: int
    num_steps: int
    tokens: int
    supervised_tokens: int
    seconds: float
    stages: dict[str, float]
    tokens_per_second: float
    peak_memory_bytes: int | None
    losses: list[tuple[int, float]]
    held_out: list[tuple[int, float]]
    best_step: int | None
    artefacts: list[tuple[str, str]]
    next_command: str
    notes: list[str] = field(default_factory=list)
    signal: str | None = None
    """Which one interrupted it."""
    changes: list[str] = field(default_factory=list)
    """What differed from the checkpoint on resume and was allowed."""
    healing: list[HealingEntry] = field(default_factory=list)
    """What went wrong and what was done about it, in all sittings."""
    advice: list[str] = field(default_factory=list)
    """What to change next time."""
    validation: Validation | None = None
    """What judging it came to; None where it was not judged."""

    @property
    def first_loss(self) -> float | None:
        return self.losses[0][1] if self.losses else None

    @property
    def last_loss(self) -> float | None:
        return self.losses[-1][1] if self.losses else None

    @property
    def held_out_first(self) -> float | None:
        return self.held_out[0][1] if self.held_out else None

    @property
    def held_out_last(self) -> float | None:
        return self.held_out[-1][1] if self.held_out else None

    @property
    def held_out_best(self) -> float | None:
        return min((loss for _, loss in self.held_out if math.isfinite(loss)), default=None)

    def as_json(self) -> dict[str, Any]:
        """Give the object that `train --json` prints."""
        told = {
            "run": str(self.run),
            "status": self.status,
            "reason": self.reason,
            "steps": self.steps,
            "num_steps": self.num_steps,
            "tokens": self.tokens,
            "supervised_tokens": self.supervised_tokens,
            "first_loss": self.first_loss,
            "last_loss": self.last_loss,
            "held_out": {
                "first": self.held_out_first,
                "last": self.held_out_last,
                "best": self.held_out_best,
                "best_step": self.best_step,
            },
            "tokens_per_second": round(self.tokens_per_second, 2),
            "peak_memory_bytes": self.peak_memory_bytes,
            "seconds": round(self.seconds, 3),
            "stages": {name: round(seconds, 3) for name, seconds in self.stages.items()},
            "artefacts": dict(self.artefacts),
            "notes": self.notes,
            "advice": self.advice,
            "healing": [entry.as_json() for entry in self.healing],
            "next": self.next_command,
            "verdict": None if self.validation is None else self.validation.report.verdict,
            "reasons": [] if self.validation is None else [r.model_dump() for r in self.validation.report.reasons],
        }
        return plain(told)


class MetricsRecorder:
    """A listener that keeps what the report needs, and passes every event on."""

    def __init__(self, *listeners: Listener) -> None:
        self._listeners = listeners
        self.losses: list[tuple[int, float]] = []
        self.held_out: list[tuple[int, float]] = []
        self.notes: list[str] = []
        self.changes: list[str] = []
        self.healing: list[HealingEntry] = []

    def __call__(self, event: Event) -> None:
        match event:
            case StepTaken(step=step, loss=loss) if event.supervised_tokens:  # without one, a step has no loss
                self.losses.append((step, loss))
            case Evaluated(step=step, loss=loss):
                self.held_out.append((step, loss))
            case Healed(entry):
                self.healing.append(entry)
            case Rewound(step):
                self.losses = [(at, loss) for at, loss in self.losses if at <= step]
                self.held_out = [(at, loss) for at, loss in self.held_out if at <= step]
            case Note(message):
                self.notes.append(message)
        for listener in self._listeners:
            listener(event)

    def note(self, message: str) -> None:
        """Send a note."""
        self(Note(message))
