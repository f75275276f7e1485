"""Choices: an answer begins with one of a few options, such as yes, no or B, and may go on with a reason."""

import re
from collections import Counter
from collections.abc import Sequence

from tunewell.core.text import fold
from tunewell.scoring.base import ReferenceRow, Score, Scorer, macro_f1, said_pairs

MAX_OPTIONS = 12
_MIN_SHARE = 0.02
"""Minimum share of the replies that begin with an option; rarer starts are chance."""
_START = re.compile(
    r"\s*[\"'`*_(\[]*(?P<option>[^\W_]+(?:[ '-][^\W_]+){0,3})\s*[*_\"'`]*"
    r"(?=$|[.,:](?!\d)|[;!?)\]\n。、！？；：।؟،]|\s[-–]\s)"
)
NAMED = re.compile(
    r"\b(?:answer|choice|option|verdict|antwort|réponse|respuesta)\b(?:\s+(?:is|ist|est|es|would be|should be))?"
    r"\s*[:=]?\s*(?:option\s+)?[\"'`*(\[]*(?P<rest>[^\n]+)"
)


def find_options(replies: Sequence[str]) -> list[str]:
    """Return the options with which nearly all replies begin or end, most frequent first; empty if there are none.

    The options are the first clauses, `Yes` in "Yes. The trial showed ...", or what is named: "... The answer is B".
    """
    return _common_starts([_named(reply) for reply in replies]) or _common_starts(replies)


def _common_starts(replies: Sequence[str]) -> list[str]:
    starts = [fold(found["option"]) for reply in replies if (found := _START.match(reply[:80]))]
    counts = Counter(starts)
    options = [text for text, number in counts.most_common() if number >= max(2, _MIN_SHARE * len(replies))]
    covered = sum(counts[text] for text in options)
    return options if 2 <= len(options) <= MAX_OPTIONS and covered >= 0.9 * len(replies) else []


def _named(reply: str) -> str:
    """Return what a reply names last as its answer, with the rest of the line."""
    return next((found["rest"] for found in reversed([*NAMED.finditer(fold(reply))])), "")


class Choice(Scorer):
    """One of a few options at the start of an answer."""

    def __init__(self, asked: Sequence[ReferenceRow], training: Sequence[ReferenceRow]) -> None:
        replies = [row.reference for row in [*training, *asked]]
        self._is_named = bool(_common_starts([_named(reply) for reply in replies]))
        self.options = find_options(replies) or sorted({fold(row.reference).strip(" .") for row in asked})[:MAX_OPTIONS]
        self.expected = [self.said(row.answers[0] if row.answers else row.reference) for row in asked]
        self.hint = (
            f"{'End' if self._is_named else 'Begin'} your answer with one of these options: {', '.join(self.options)}."
        )

    def score(self, index: int, answer: str) -> Score:
        """Compare the option of the answer with that of the reference."""
        expected, said = self.expected[index], self.said(answer)
        if not expected:
            return Score(None, "the reference contains none of the options")
        return Score(said == expected, f"says {said}" if said else "contains none of the options", said=said)

    def said(self, text: str) -> str:
        """Return the option at the start of a text, or else the only one that is stated, as in `the answer is B`."""
        folded = fold(text).strip()
        if found := (self._is_named and self._at_start(_named(text))) or self._at_start(folded):
            return found
        named = {option for match in NAMED.finditer(folded) if (option := self._at_start(match["rest"]))}
        return named.pop() if len(named) == 1 else ""

    def _at_start(self, text: str) -> str:
        bare = re.sub(r"^(?![+-]\d)[\W_]+", "", text)
        fitting = list[str]()
        for option in self.options:
            # `yes or no` and `a cat` give no option; "No, no effect was seen" does.
            others = "|".join(re.escape(other) for other in self.options if other != option)
            is_alone = rf"{re.escape(option)}(?![\w']|[.,:]\d)(?!\s*(?:/|,|or\b|and\b)\s*(?:{others or '(?!)'})\b)"
            is_letter = r".(?:\W*$|[.,:;)\]\n]|\s+(?:because|since|as|is)\b)"
            if re.match(is_alone, bare) and (len(option) > 1 or re.match(is_letter, bare)):
                fitting.append(option)
        return max(fitting, key=len, default="")

    def measures(self, scores: Sequence[Score]) -> dict[str, float]:
        """Return the macro-F1 over the options."""
        return {"macro-F1": macro_f1(said_pairs(self.expected, scores))}
