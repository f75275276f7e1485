"""The result of a rehearsal: whether the loss of a few rows fell and answers changed, with memory and speed."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tunewell.config.extensions import METHODS
from tunewell.core.html import render
from tunewell.core.units import count
from tunewell.inference.runtime import DocumentLosses
from tunewell.records.events import plain
from tunewell.records.plan import Plan
from tunewell.records.report import EXIT_CODES
from tunewell.training.events import Sample, StepTaken
from tunewell.training.run import Ending

_MIN_FALL, _MIN_ERRORS = 0.01, 3.0
"""The loss must fall by 1% and, over the rows, by three standard errors. Without an effect of training, 20 rows do that
by chance less than once in 250 rehearsals."""


@dataclass(frozen=True)
class Rehearsal:
    """The result of a rehearsal: the losses of the same rows before and after, answers, memory and speed."""

    num_rows: int
    step_tokens: int
    before: DocumentLosses
    after: DocumentLosses
    answers: list[tuple[Sample, Sample]]
    """Answers to the same questions before and after."""
    steps: list[StepTaken]
    ending: Ending
    plan: Plan
    """The plan of the whole run."""
    num_documents: int
    """Number of training documents of the whole run."""
    corpus_tokens: int
    peak_memory_bytes: int | None
    seconds: float
    stages: dict[str, float]
    next_command: str
    notes: list[str] = field(default_factory=list)

    @property
    def loss_before(self) -> float:
        """The mean loss over the supervised tokens of the rows; NaN if there are none."""
        return self.before.mean()

    @property
    def loss_after(self) -> float:
        return self.after.mean()

    @property
    def _change(self) -> str:
        return f"{self.loss_before:.4f} -> {self.loss_after:.4f}"

    @property
    def falls(self) -> npt.NDArray[np.float64]:
        """By how much the loss of each row fell."""
        known = self.before.tokens > 0
        return (self.before.sums[known] - self.after.sums[known]) / self.before.tokens[known]

    @property
    def tokens_per_second(self) -> float:
        """The speed of the steps after the first, which is slower."""
        steps = self.steps[1:] or self.steps
        return sum(step.tokens for step in steps) / max(1e-9, sum(step.seconds for step in steps))

    @property
    def full_seconds(self) -> float:
        """The time of all steps of the run, extrapolated from the speed."""
        return self.plan.epochs.value * self.corpus_tokens / max(1e-9, self.tokens_per_second)

    @property
    def exit_code(self) -> int:
        if self.ending.status == "interrupted":
            return self.ending.exit_code
        return EXIT_CODES["FAIL"] if self.problems else 0

    @property
    def problems(self) -> list[tuple[str, str]]:
        """What is wrong, each with its likely cause and remedy. Empty if the rehearsal passed."""
        if self.ending.status != "finished":
            return [(self.ending.reason, self.ending.advice or "")]
        if not self.before.tokens.sum():
            remedy = "check `template.learn_from` and `template.learn_roles` with `tunewell inspect`"
            return [(f"nothing is supervised in these {count(self.num_rows, 'row')}", remedy)]
        found: list[tuple[str, str]] = []
        change = f"{self._change} in {count(len(self.steps), 'step')}"
        rate, default = self.plan.learning_rate.value, METHODS.entry(self.plan.method.value).learning_rate
        fall = float(self.falls.mean())
        error = float(self.falls.std(ddof=1)) / math.sqrt(len(self.falls)) if len(self.falls) > 1 else 0.0
        if not self.loss_after <= self.loss_before * (1 + _MIN_FALL):
            found.append(
                (f"the loss rises: {change}", f"`train.learning_rate: {rate:g}` is too high; try {rate / 10:g}")
            )
        elif self.loss_after > self.loss_before * (1 - _MIN_FALL) or not fall >= _MIN_ERRORS * error:
            remedy = (
                "look at the supervised tokens with `tunewell inspect`: they may not depend on the text before them"
            )
            if not any(step.grad_norm > 0 for step in self.steps):
                remedy = "no gradient reaches the trainable weights; check `method.targets` and `method.layers`"
            elif rate < default:
                remedy = f"`train.learning_rate: {rate:g}` may be too low; `auto` chooses one for this model"
            found.append((f"the loss does not fall: {change}", remedy))
        if self.answers and all(before.answer == after.answer for before, after in self.answers):
            remedy = "" if found else "the loss falls too slowly to show; a higher `train.learning_rate` may help"
            found.append((f"none of {count(len(self.answers), 'answer')} changed", remedy))
        return found

    def __repr__(self) -> str:
        passed, steps = not self.problems, len(self.steps)
        return f"Rehearsal(passed={passed}, loss={self._change}, rows={self.num_rows}, steps={steps})"

    def _repr_html_(self) -> str:
        return render("tunewell.runs", "rehearsal.html", rehearsal=self, change=self._change)

    def as_json(self) -> dict[str, Any]:
        """Return the object that `train --rehearse --json` prints."""
        payload = {
            "passed": not self.problems,
            "problems": [{"what": what, "next": remedy} for what, remedy in self.problems],
            "rows": self.num_rows,
            "steps": len(self.steps),
            "step_tokens": self.step_tokens,
            "loss": {"before": self.loss_before, "after": self.loss_after, "rows_fallen": int((self.falls > 0).sum())},
            "answers": [
                {"question": old.question, "before": old.answer, "after": new.answer, "expected": old.reference}
                for old, new in self.answers
            ],
            "peak_memory_bytes": self.peak_memory_bytes,
            "tokens_per_second": round(self.tokens_per_second, 2),
            "run": {
                "steps": self.plan.num_steps.value,
                "seconds_per_step": self.full_seconds / self.plan.num_steps.value,
                "seconds": self.full_seconds,
            },
            "seconds": round(self.seconds, 3),
            "stages": {name: round(seconds, 3) for name, seconds in self.stages.items()},
            "notes": self.notes,
            "next": self.next_command,
        }
        return plain(payload)
