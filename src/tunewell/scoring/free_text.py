"""Texts, conversations and documents: they can be worded in many ways, so no answer is right or wrong.

They are measured by word overlap, length, faults and the loss. With `verdict.task: file.py:function`, a function of the
user decides which answers are right.
"""

import math
from collections.abc import Callable, Sequence
from statistics import median

from tunewell.core.errors import UserError
from tunewell.scoring.base import ReferenceRow, Score, Scorer


class FreeText(Scorer):
    """Answers that are not judged."""

    def __init__(self, asked: Sequence[ReferenceRow], training: Sequence[ReferenceRow]) -> None:
        self.expected = [""] * len(asked)
        self._words = [len(row.reference.split()) for row in asked]

    def score(self, index: int, answer: str) -> Score:
        """Return a score without a result; `said` is the number of words."""
        return Score(None, "free text", said=str(len(answer.split())))

    def measures(self, scores: Sequence[Score]) -> dict[str, float]:
        """Return the median ratio of the length of an answer to that of its reference, in words."""
        shares = [int(score.said) / words for score, words in zip(scores, self._words, strict=True) if words]
        return {"length / reference": median(shares)} if shares else {}


class UserFunction(Scorer):
    """A function of the user, `fn(question, answer, reference)`, that returns whether an answer is right.

    It may return a number from 0 to 1; an answer is right from 0.5.
    """

    def __init__(self, function: Callable[[str, str, str], float | bool], asked: Sequence[ReferenceRow]) -> None:
        self._function, self._asked = function, asked
        self.expected = [row.reference for row in asked]

    def score(self, index: int, answer: str) -> Score:
        """Call the function; raise UserError if it fails, because it decides the verdict."""
        row = self._asked[index]
        try:
            value = self._function(row.question, answer, row.reference)
            if isinstance(value, str) or not math.isfinite(value):
                raise TypeError(f"it returned {value!r}, not True, False or a number")
        except (Exception, SystemExit) as error:
            raise UserError(
                f"the function of `verdict.task` failed: {type(error).__name__}: {error}",
                where=f'question: "{row.question[:80]}"',
                fix="correct the function; it is called as `fn(question, answer, reference)`",
            ) from error
        return Score(float(value) >= 0.5, f"the function returned {value}", said=f"{float(value):.4g}")

    def measures(self, scores: Sequence[Score]) -> dict[str, float]:
        """Return the mean value of the function."""
        return {"mean of your function": sum(float(score.said) for score in scores) / len(scores)} if scores else {}
