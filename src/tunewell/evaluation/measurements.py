"""What a verdict rests on, and how it is put into words."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tunewell.evaluation.matching import is_short_reference
from tunewell.records.report import Answer, AnswerCounts, AnsweredQuestion, LogitChange, LossPair

FEW_QUESTIONS = 5
"""Questions or documents below which no share of them makes a FAIL: of three, one more or less is everything."""


@dataclass(frozen=True)
class Measurements:
    """Everything that was measured of a model; what was not is None or empty."""

    bad_weights: Mapping[str, int] = field(default_factory=dict)
    """Tensors with values that are not finite, and how many."""
    change: LogitChange | None = None
    held_out: LossPair | None = None
    by_source: Sequence[LossPair] = ()
    everyday: LossPair | None = None
    vocab_size: int | None = None
    """Gives the loss of a model that knows nothing, ln(vocab_size)."""
    train_curve: Sequence[tuple[int, float]] = ()
    """(step, loss), as logged."""
    held_out_curve: Sequence[tuple[int, float]] = ()
    judged_step: int | None = None
    best_step: int | None = None
    base_tally: AnswerCounts | None = None
    tuned_tally: AnswerCounts | None = None
    """Used where there are no exchanges."""
    exchanges: Sequence[AnsweredQuestion] = ()
    is_adapter: bool = False
    learning_rate: float | None = None
    """How it was trained, so that the next value can be named."""
    epochs: float | None = None
    corpus: str = "corpus"
    """The folder to name in commands."""

    @property
    def base_loss(self) -> float | None:
        """The base model's held-out loss, where there is one to compare with."""
        base = self.held_out.base if self.held_out else None
        return base if base is not None and math.isfinite(base) else None

    @property
    def short(self) -> list[AnsweredQuestion]:
        """The exchanges whose answers can be right or wrong."""
        return [exchange for exchange in self.exchanges if is_short_reference(exchange.reference)]


def count_answers(saids: Sequence[Answer]) -> AnswerCounts:
    """Count the answers of one model."""
    faults: dict[str, int] = {}
    for fault in (fault for said in saids for fault in said.faults):
        faults[fault] = faults.get(fault, 0) + 1
    return AnswerCounts(
        asked=len(saids),
        judged=sum(said.right is not None for said in saids),
        exact=sum(said.exact for said in saids),
        contains=sum(said.contains for said in saids),
        right=sum(bool(said.right) for said in saids),
        f1=sum(said.f1 for said in saids) / len(saids) if saids else 0.0,
        faults=faults,
    )


def soften(level: Literal["WEAK", "FAIL"], number: int) -> Literal["WEAK", "FAIL"]:
    """Soften a FAIL that rests on very few questions or documents."""
    return "WEAK" if number < FEW_QUESTIONS else level


def short_loss(loss: float) -> str:
    """Write a loss with two digits: `2.09`, `0.03`, `0.0052`."""
    if not math.isfinite(loss):
        return "not finite"
    return f"{loss:.2f}" if loss >= 0.1 else f"{loss:.2g}" if loss >= 0.0001 else "under 0.0001"


def short_text(text: str, most: int = 100) -> str:
    """Write a text on one line, cut where it is long."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 3].rstrip() + "..."


def quote_answer(exchange: AnsweredQuestion, *, with_reference: bool = False) -> str:
    """Show one exchange: what was asked, what should have been said and what was."""
    said = f'"{short_text(exchange.tuned.text)}"' if exchange.tuned.text.strip() else "nothing"
    due = f' (reference: "{short_text(exchange.reference, 60)}")' if with_reference else ""
    return f'asked "{short_text(exchange.question)}", it said {said}{due}'


def suggest_rate(facts: Measurements, factor: float, words: str) -> str:
    """Name a learning rate to try: `train.learning_rate: 0.0003` where the present one is known."""
    if facts.learning_rate is None:
        return f"`train.learning_rate` {words}"
    # The config takes 1 at most.
    return f"`train.learning_rate: {min(1.0, facts.learning_rate * factor):.2g}`, {words}"
