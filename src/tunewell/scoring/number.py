"""Numbers: an answer is right if its result is the number of the reference, in any unit of the same kind.

The result is the number after `####` or in a box, otherwise the first after `answer is`, otherwise the last number.
"""

import re
from collections.abc import Sequence

from tunewell.core.text import fold
from tunewell.scoring.answer_values import Value, find_values
from tunewell.scoring.base import ReferenceRow, Score, Scorer

_FINAL = re.compile(r"####\s*([^\n]+)|\\boxed\{([^{}]+)\}")
"""The marked result of a solution."""
_ANSWER_IS = re.compile(r"\banswer\s*(?:is|:|=)\s*([^\n]+)")
_DECIMALS = re.compile(r"\d*[.](\d{2,})\b")


class Number(Scorer):
    """The final number of an answer."""

    def __init__(self, asked: Sequence[ReferenceRow], training: Sequence[ReferenceRow]) -> None:
        texts = [row.answers[0] if row.answers else row.reference for row in asked]
        self._results = [result(text) for text in texts]
        self.expected = [text for _, text in self._results]

    def score(self, index: int, answer: str) -> Score:
        """Compare the result of the answer with that of the reference."""
        expected, shown = self._results[index]
        if expected is None:
            return Score(None, "the reference has no number")
        found, text = result(answer)
        if found is None:
            return Score(False, "the answer has no number")
        return Score(is_same(found, expected, shown), f"the result is {text}", said=text)

    def measures(self, scores: Sequence[Score]) -> dict[str, float]:
        """Return the share of answers that contain a number."""
        judged = [score for score in scores if score.right is not None]
        return {"answers with a number": sum(bool(score.said) for score in judged) / len(judged)} if judged else {}


def marked_results(text: str) -> list[str]:
    """Return the texts that a solution marks as results: after `####`, or in a box."""
    return [found[1] or found[2] for found in _FINAL.finditer(text)]


def result(text: str) -> tuple[Value | None, str]:
    """Return the result of a solution and its text, or None if it has no number."""
    folded = fold(text)
    for part, index in ((marked_results(folded), 0), (_ANSWER_IS.findall(folded), 0), ([folded], -1)):
        values = [value for value in find_values(part[-1]) if value.kind == "number"] if part else []
        if values:
            value = values[index]
            return value, part[-1][value.start : value.end].strip()
    return None, ""


def is_same(found: Value, expected: Value, shown: str) -> bool:
    """Return True if two values are equal, or if the first is a more exact form of a decimal number."""
    if found.is_same_amount(expected):
        return True
    decimals = _DECIMALS.search(shown)
    if decimals is None or found.unit != expected.unit:
        return False
    # 3.14159 is 3.14: rounded to the digits of the reference.
    digits = len(decimals[1])
    return any(round(one[0], digits) == other[0] for one in found.readings for other in expected.readings)
