"""The protocol of a scorer, and what all scorers share."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from tunewell.core.text import fold

_THINKING = re.compile(
    r"<(?P<tag>think|thinking|thought|reasoning|reflection|scratchpad)>.*?(?:</(?P=tag)>|\Z)"
    r"|\[THINK\].*?(?:\[/THINK\]|\Z)"
    r"|<\|channel\|>analysis<\|message\|>.*?(?:<\|channel\|>final<\|message\|>|\Z)"
    r"|\A<\|channel\|>final<\|message\|>|<\|channel>thought.*?(?:<channel\|>|\Z)",
    re.DOTALL | re.IGNORECASE,
)
_THOUGHT_BEFORE = re.compile(r"\A(?:(?!<think>).)*</think>", re.DOTALL | re.IGNORECASE)
"""Some templates open the thinking in the prompt, so that an answer contains only the closing tag."""
_FENCE = re.compile(r"\A\s*```[\w+-]*[ \t]*\n?(.*?)\n?[ \t]*```\s*\Z", re.DOTALL)


@dataclass(frozen=True)
class ReferenceRow:
    """A question and its reference, with the accepted answers of the row if it has some."""

    question: str
    reference: str
    answers: tuple[str, ...] = ()
    """The column `answers` or `value` of the row: an answer is right if it contains one of them."""
    origin: Literal["answers", "value"] = "answers"
    """The column of `answers`."""
    num_replies: int = 1
    """Number of replies in the conversation."""


@dataclass(frozen=True)
class Score:
    """The result of scoring one answer."""

    right: bool | None
    """None if the question cannot be judged."""
    because: str = ""
    said: str = ""
    """The label or option in the answer, for tables of confusions."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Name of a field -> `right`, `wrong`, `missing` or `extra`, for structured answers."""
    is_refusal: bool = False
    """Whether the answer says that it is not known. A refusal is not right, unless the reference is one."""

    @property
    def is_wrong(self) -> bool:
        """Whether the answer is neither right nor a refusal."""
        return self.right is False and not self.is_refusal


class Scorer(Protocol):
    """Scores the answers to some questions. It is made from them and from training rows: `Labels(asked, training)`.

    A scorer may inherit from this class for the defaults.
    """

    expected: list[str]
    """What a right answer to each question says, for people; an empty text if answers to it cannot be judged."""
    hint: str = ""
    """An instruction that lists the labels, fields or tools, with which a base model is asked again."""

    def score(self, index: int, answer: str) -> Score:
        """Score an answer to the question with this index."""
        ...

    def measures(self, scores: Sequence[Score]) -> dict[str, float]:
        """Return further figures of the task, each from 0 to 1, such as the macro-F1 of labels."""
        return {}

    def figures(self, texts: Sequence[str]) -> dict[str, float]:
        """Return figures of some texts, to compare the answers of both models with the references."""
        return {}


def score_answer(scorer: Scorer, index: int, answer: str, asked: ReferenceRow) -> Score:
    """Score an answer without its thinking. An answer equal to its reference is right, whatever the scorer says."""
    answer, reference = without_thinking(answer), without_thinking(asked.reference)
    found = scorer.score(index, answer)
    if reference and found.right is False and " ".join(answer.split()) == " ".join(reference.split()):
        return replace(found, right=True, because="equals the reference", is_refusal=False)
    return found


def without_thinking(text: str) -> str:
    """Return a text without the thinking of a model before its answer: `<think>...</think>` and the like."""
    return _THINKING.sub("", _THOUGHT_BEFORE.sub("", text)).strip()


def without_fence(text: str) -> str:
    """Return the content of a text that is one fenced block of code, otherwise the text."""
    found = _FENCE.match(text)
    return (found[1] if found else text).strip()


def most_frequent(training: Sequence[ReferenceRow]) -> str:
    """Return the most frequent reply of the training rows, or an empty text if no reply occurs twice."""
    texts = [fold(row.reference).strip() for row in training]
    folded, times = Counter(texts).most_common(1)[0] if texts else ("", 0)
    return training[texts.index(folded)].reference if times > 1 else ""


def said_pairs(expected: Sequence[str], scores: Sequence[Score]) -> list[tuple[str, str]]:
    """Return what each judged answer should say, and what it says."""
    return [(text, score.said) for text, score in zip(expected, scores, strict=True) if text]


def macro_f1(pairs: Sequence[tuple[str, str]]) -> float:
    """Return the mean F1 over the expected labels; `pairs` are (expected, said)."""
    expected, said = (Counter(pair[side] for pair in pairs) for side in (0, 1))
    same = Counter(one for one, other in pairs if one == other)
    scores = [2 * same[label] / (expected[label] + said[label]) for label in expected]
    return sum(scores) / len(scores) if scores else 0.0
