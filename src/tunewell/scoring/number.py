"""Numbers: an answer is right if its result is the number of the reference, in any unit of the same kind.

The result is the number after `####` or in a box, otherwise the first after `answer is`, otherwise the last number.
"""

import re
from collections.abc import Sequence

from tunewell.core.text import fold
from tunewell.scoring.answer_values import Value, find_values
from tunewell.scoring.base import ReferenceRow, Score, Scorer

_FINAL = re.compile(r"####\s*([^\n]+)|\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
"""The marked result of a solution."""
_ANSWER_IS = re.compile(r"\banswer\s*(?:is|:|=)\s*(?!not\b)([^\n]+)")
_DENIED = re.compile(r"\banswer\s*(?:is not|isn't)\b|\d\s*or\s*\d")
_SPELLINGS = (
    (re.compile(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}"), r"\1/\2"),
    (re.compile(r"\\(?:text|mathrm)\{([^{}]*)\}"), r"\1"),
    (re.compile(r"(?<=\d)\s*(?:×|\*|\\times|\\cdot)\s*10\s*(?:\^|\*\*)\s*\{?([+-]?\d+)\}?"), r"e\1"),
    (re.compile(r"\^\s*\{?\\circ\}?|\\[,;! ]"), " "),
    (re.compile(r"\\([%$])"), r"\1"),
)
"""Forms of LaTeX, and how numbers are read from them."""
_EXPRESSION = re.compile(
    r"\d[a-z]\b|\b[a-z]\s*[-+*/^=]|[-+*/^]\s*[a-z]\b|\\[a-z]|[\^√π]|\d\s*:\s*\d|[(\[{]\s*-?[\d./]+\s*,"
)
"""A result that is more than a number, such as `2x + 3`, `3\\sqrt{2}`, `3:2` or `(1, 2)`."""
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
        if not shown:
            return Score(None, "the reference has no number")
        found, text = result(answer)
        if found is None or expected is None:
            # A marked expression, such as `2x + 3`, is compared as a text.
            return Score(found is expected and text == shown, "no number, or an expression", said=text)
        return Score(is_same(found, expected, shown), f"the result is {text}", said=text)

    def measures(self, scores: Sequence[Score]) -> dict[str, float]:
        """Return the share of answers that contain a number."""
        judged = [score for score in scores if score.right is not None]
        return {"answers with a number": sum(bool(score.said) for score in judged) / len(judged)} if judged else {}


def marked_results(text: str) -> list[str]:
    """Return the texts that a solution marks as results: after `####`, or in a box."""
    return [(found[1] or found[2]).rpartition("=")[2] for found in _FINAL.finditer(text)]


def stated_results(folded: str) -> list[str]:
    """Return the texts that a folded solution states as its answer: `the answer is 2 + 3 = 5` gives 5."""
    return [part.rpartition("=")[2] for part in _ANSWER_IS.findall(folded)]


def result(text: str) -> tuple[Value | None, str]:
    """Return the result of a solution and its text, or None if it has no number."""
    for pattern, plain in _SPELLINGS:
        text = pattern.sub(plain, text)
    folded = fold(text)
    marked = marked_results(folded)
    if not marked and _DENIED.search(folded):
        return None, ""
    stated = stated_results(folded)
    for part, index in ((marked, 0), (stated, 0), ([folded], -1)):
        values = [value for value in find_values(part[-1]) if value.kind == "number"] if part else []
        if part is marked and marked and _EXPRESSION.search(marked[-1]):
            return None, re.sub(r"\s+", "", marked[-1])
        # In a sentence, "the two girls" is no result if there are digits.
        digits = [value for value in values if re.search(r"\d", part[-1][value.start : value.end])]
        values = digits or values
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
