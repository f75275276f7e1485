"""The measurements that a verdict is based on, and helpers that format them."""

import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tunewell.core.text import shorten_line
from tunewell.evaluation.intervals import PairedDifference, compare_pair, share_interval
from tunewell.records.report import (
    Answer,
    AnswerCounts,
    AnsweredQuestion,
    ConstantAnswer,
    Forgotten,
    LogitChange,
    LossPair,
)
from tunewell.records.rundir import train_again_command

FEW_QUESTIONS = 5
"""With fewer questions than this, a share of them is never a FAIL, because one answer changes it too much."""


@dataclass(frozen=True)
class Measurements:
    """The measurements of a model and the settings of its training; unknown values are None or empty."""

    bad_weights: Mapping[str, int] = field(default_factory=dict)
    """Number of NaN or infinite values by tensor name."""
    change: LogitChange | None = None
    held_out: LossPair | None = None
    by_source: Sequence[LossPair] = ()
    everyday: LossPair | None = None
    loss_difference: PairedDifference | None = None
    """Held-out loss of the base model minus that of the tuned model: above zero, the tuned model is better."""
    task: str = "text"
    noun: str = "answers"
    """What is right, in the plural."""
    min_right: float | None = None
    """Share of the questions that must be answered right; None if no answer is right or wrong."""
    constant: ConstantAnswer | None = None
    forgotten: Sequence[Forgotten] = ()
    train_curve: Sequence[tuple[int, float]] = ()
    """Pairs of (step, loss) from the training log."""
    held_out_curve: Sequence[tuple[int, float]] = ()
    evaluated_step: int | None = None
    questions: Sequence[AnsweredQuestion] = ()
    num_held_out: int = 0
    """Number of held-out rows, of which at most `verdict.questions` were asked."""
    is_adapter: bool = False
    learning_rate: float | None = None
    """Learning rate of the training, used in advice."""
    replay: float | None = 0.0
    """Share of everyday prompts in the training (`train.replay`); None if the run can have none."""
    epochs: float | None = None
    max_steps: int | None = None
    """The setting `train.max_steps`, which takes precedence over the epochs."""
    corpus: str = "corpus"
    """Path of the corpus, for suggested commands."""
    model_path: str = "run"
    """Path of the model, for suggested commands."""
    new_run: str | None = None
    """A folder that does not exist, for a training with other settings; None if the model is not a run."""
    is_held_out_auto: bool = False
    """Whether `data.held_out` is `auto`."""
    num_rows: int | None = None
    """Number of training rows and held-out rows in the corpus."""
    test_file: str | None = None
    """File with the evaluated rows, or None for the held-out rows of the run."""

    @property
    def base_loss(self) -> float | None:
        """The base model's held-out loss, if it is known and finite."""
        base = self.held_out.base if self.held_out else None
        return base if base is not None and math.isfinite(base) else None

    @property
    def longer(self) -> str:
        """The setting for a training of twice the length, for advice."""
        if self.max_steps:
            return f"train.max_steps={2 * self.max_steps}"
        return f"train.epochs={2 * self.epochs:.3g}" if self.epochs else "twice the `train.epochs`"

    @property
    def is_still_falling(self) -> bool:
        """Whether the last evaluation during training was the best, or the only one."""
        losses = [loss for _, loss in self.held_out_curve if math.isfinite(loss)]
        return losses[-1:] == [min(losses, default=0.0)] or not losses

    def rate(self, factor: float) -> str:
        """Return the setting of another learning rate, for advice. The config allows at most 1."""
        if self.learning_rate is None:
            return f"{'a third of' if factor < 1 else 'three times'} the `train.learning_rate`"
        return f"train.learning_rate={min(1.0, self.learning_rate * factor):.2g}"

    def train_again(self, *settings: str, expected: str) -> str:
        """Return the command for a new run that differs from this one in some settings, and what it should change."""
        if self.new_run is None or any("=" not in setting for setting in settings):
            named = " and ".join(setting if "`" in setting else f"`{setting}`" for setting in settings)
            return f"Train it again with {named}: {expected}."
        return f"`{train_again_command(self.model_path, settings, out=self.new_run)}`: {expected}."

    @property
    def more_replay(self) -> float:
        """A larger `train.replay`. Few rows need more: of 120 rows, 0.2 kept half of what 0.5 kept."""
        return min(0.5, max(0.05 if (self.num_rows or 0) >= 1_000 else 0.2, 2.5 * (self.replay or 0.0)))

    @property
    def judged(self) -> list[AnsweredQuestion]:
        """The questions whose answers are right or wrong."""
        return [question for question in self.questions if question.tuned.right is not None]

    def num_right(self, *, of_base: bool = False) -> int:
        """Return the number of right answers of one model."""
        answers = bases_of(self.judged) if of_base else [one.tuned for one in self.judged]
        return sum(bool(answer.right) for answer in answers)

    @property
    def difference(self) -> PairedDifference | None:
        """Share of right answers of the tuned model minus that of the base model; None if there is no base model."""
        asked = [one for one in self.judged if one.base is not None]
        if not asked:
            return None
        tuned, base = [bool(one.tuned.right) for one in asked], [bool(one.base and one.base.right) for one in asked]
        return compare_pair(tuned, base, cluster_numbers(asked), names=("the tuned model", "the base model"))

    @property
    def inspect_command(self) -> str:
        """The command that shows which tokens are supervised."""
        return f"`tunewell inspect {shlex.quote(self.corpus)}`"


def cluster_numbers(questions: Sequence[AnsweredQuestion]) -> list[int]:
    """Return the cluster of each question; a question without a number is a cluster of its own."""
    return [-1 - index if each.cluster is None else each.cluster for index, each in enumerate(questions)]


def bases_of(questions: Sequence[AnsweredQuestion]) -> list[Answer]:
    """Return the answers of the base model."""
    return [question.base for question in questions if question.base is not None]


def count_answers(answers: Sequence[Answer], clusters: Sequence[int] = ()) -> AnswerCounts:
    """Return the counts of exact, right and faulty answers of one model, the mean F1, and an interval of its share."""
    judged = [
        (bool(each.right), cluster) for each, cluster in zip(answers, clusters, strict=False) if each.right is not None
    ]
    return AnswerCounts(
        **{name: sum(bool(getattr(each, name)) for each in answers) for name in ("exact", "contains", "right")},
        asked=len(answers),
        judged=sum(each.right is not None for each in answers),
        f1=sum(each.f1 for each in answers) / max(1, len(answers)),
        faults=dict(Counter(fault for each in answers for fault in each.faults)),
        refused=sum(each.is_refusal for each in answers),
        right_interval=share_interval(*zip(*judged, strict=True)) if judged else None,
    )


def short_loss(loss: float) -> str:
    """Format a loss with two decimals, or with two significant digits if it is small: `2.09`, `0.03`, `0.0052`."""
    if not math.isfinite(loss):
        return "not finite"
    return f"{loss:.2f}" if loss >= 0.1 else f"{loss:.2g}" if loss >= 0.0001 else "under 0.0001"


def quote_answer(question: AnsweredQuestion, *, with_reference: bool = False) -> str:
    """Return the question, the answer and optionally the reference on one line."""
    answer = f'"{shorten_line(question.tuned.text)}"' if question.tuned.text.strip() else "(empty)"
    expected = f' (expected: "{shorten_line(question.reference, 60)}")' if with_reference else ""
    return f'question: "{shorten_line(question.question)}", answer: {answer}{expected}'
