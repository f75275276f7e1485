"""The measurements that a verdict is based on, and helpers that format them."""

import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tunewell.evaluation.matching import is_short_reference
from tunewell.records.report import Answer, AnswerCounts, AnsweredQuestion, LogitChange, LossPair

FEW_QUESTIONS = 5
"""Questions or rows below which no share of them is a FAIL: of three, one more or less changes everything."""


@dataclass(frozen=True)
class Measurements:
    """What was measured about a model, and how it was trained; None or empty if unknown."""

    bad_weights: Mapping[str, int] = field(default_factory=dict)
    """Tensors with values that are not finite, and their number."""
    change: LogitChange | None = None
    held_out: LossPair | None = None
    by_source: Sequence[LossPair] = ()
    everyday: LossPair | None = None
    vocab_size: int | None = None
    """A model that knows nothing has a loss of ln(vocab_size)."""
    train_curve: Sequence[tuple[int, float]] = ()
    """(step, loss), as logged."""
    held_out_curve: Sequence[tuple[int, float]] = ()
    evaluated_step: int | None = None
    questions: Sequence[AnsweredQuestion] = ()
    is_adapter: bool = False
    learning_rate: float | None = None
    """Of the training, so that advice can name the next value."""
    epochs: float | None = None
    corpus: str = "corpus"
    """Path for commands."""
    model_path: str = "run"
    """Path for commands."""
    num_rows: int | None = None
    """Rows of the corpus, trained on and held out."""
    test_file: str | None = None
    """File of the evaluated rows; None for the held-out rows of the run."""

    @property
    def base_loss(self) -> float | None:
        """The base model's held-out loss, if it is known and finite."""
        base = self.held_out.base if self.held_out else None
        return base if base is not None and math.isfinite(base) else None

    @property
    def short_questions(self) -> list[AnsweredQuestion]:
        """The questions whose answers can be right or wrong."""
        return [question for question in self.questions if is_short_reference(question.reference)]

    @property
    def inspect_command(self) -> str:
        """The command that shows which tokens are supervised."""
        return f"`tunewell inspect {shlex.quote(self.corpus)}`"


def count_answers(answers: Sequence[Answer]) -> AnswerCounts:
    """Count the answers of one model."""
    return AnswerCounts(
        asked=len(answers),
        judged=sum(answer.right is not None for answer in answers),
        exact=sum(answer.exact for answer in answers),
        contains=sum(answer.contains for answer in answers),
        right=sum(bool(answer.right) for answer in answers),
        f1=sum(answer.f1 for answer in answers) / len(answers) if answers else 0.0,
        faults=dict(Counter(fault for answer in answers for fault in answer.faults)),
    )


def soften(level: Literal["WEAK", "FAIL"], num_questions: int) -> Literal["WEAK", "FAIL"]:
    """Turn a FAIL that rests on very few questions or rows into WEAK."""
    return "WEAK" if num_questions < FEW_QUESTIONS else level


def short_loss(loss: float) -> str:
    """Format a loss with two digits: `2.09`, `0.03`, `0.0052`."""
    if not math.isfinite(loss):
        return "not finite"
    return f"{loss:.2f}" if loss >= 0.1 else f"{loss:.2g}" if loss >= 0.0001 else "under 0.0001"


def shorten(text: str, max_chars: int = 100) -> str:
    """Return a text on one line, cut if it is long."""
    line = " ".join(text.split())
    return line if len(line) <= max_chars else line[: max_chars - 3].rstrip() + "..."


def quote_answer(question: AnsweredQuestion, *, with_reference: bool = False) -> str:
    """Return the question, the answer and, if asked for, the reference on one line."""
    answer = f'"{shorten(question.tuned.text)}"' if question.tuned.text.strip() else "(empty)"
    expected = f' (expected: "{shorten(question.reference, 60)}")' if with_reference else ""
    return f'question: "{shorten(question.question)}", answer: {answer}{expected}'


def suggest_rate(measured: Measurements, factor: float) -> str:
    """Return a learning rate to set: with its value if the current one is known."""
    fraction = "a third of" if factor < 1 else "three times"
    if measured.learning_rate is None:
        return f"`train.learning_rate` to {fraction} its value"
    # The config allows at most 1.
    return f"`train.learning_rate: {min(1.0, measured.learning_rate * factor):.2g}` ({fraction} its value)"
