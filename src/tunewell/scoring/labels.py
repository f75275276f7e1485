"""Labels: an answer is right if it is the label, except for case, spacing and punctuation around it."""

import re
from collections import Counter
from collections.abc import Sequence

from tunewell.core.text import fold
from tunewell.scoring.base import ReferenceRow, Score, Scorer, macro_f1, said_pairs

_MAX_WORDS, _MAX_CHARS = 8, 60
_MAX_LISTED = 400
"""Maximum number of labels that are listed in a prompt."""
_AROUND = " \t\n.,;:!?\"'`“”«»()。、！？；：…।॥؟،「」『』（）"
_BOLD = re.compile(r"\A(\*{1,3})(.+)\1\Z", re.DOTALL)
"""A single `*` belongs to a label: the grade `A*` is not `A`."""
_SEPARATORS = re.compile(r"(?<=\w)[\s_-]+(?=\w)|\s+")
"""A sign is no separator: `-1` is not `1`, and `A-` is not `A`."""


class Labels(Scorer):
    """Exact labels. Spellings that differ in case, spaces, `_` and `-` are one label."""

    def __init__(self, asked: Sequence[ReferenceRow], training: Sequence[ReferenceRow]) -> None:
        # The base model must not be told the labels of the test.
        counts = Counter(row.reference.strip() for row in training or asked)
        # The most frequent spelling of a label is last, and so is kept. Long replies that occur once are no labels.
        self.labels = {
            fold_label(text): text
            for text, number in reversed(counts.most_common())
            if text and (number > 1 or is_short_label(text))
        }
        self._accepted = [[fold_label(text) for text in (row.reference, *row.answers) if text.strip()] for row in asked]
        known = [accepted[0] in self.labels for accepted in self._accepted if accepted]
        # Rows of another task are not judged; a label that is missing in the training rows is.
        is_other_task = 2 * sum(known) < len(known)
        self._accepted = [
            accepted
            if accepted and (accepted[0] in self.labels or (is_short_label(accepted[0]) and not is_other_task))
            else []
            for accepted in self._accepted
        ]
        self.expected = [self.labels.get(accepted[0], accepted[0]) if accepted else "" for accepted in self._accepted]
        listed = "\n".join(sorted(self.labels.values()))
        self.hint = f"Answer with exactly one of these labels:\n{listed}" if len(self.labels) <= _MAX_LISTED else ""

    def score(self, index: int, answer: str) -> Score:
        """Compare the whole answer with the label."""
        accepted, said = self._accepted[index], fold_label(answer)
        if not accepted:
            return Score(None, "the reference is not a label")
        label = self.labels.get(said, "")
        because = "the label" if said in accepted else f"another label: {label}" if label else "not a label"
        return Score(said in accepted, because, said=label)

    def measures(self, scores: Sequence[Score]) -> dict[str, float]:
        """Return the macro-F1: the mean over the labels, however rare they are."""
        return {"macro-F1": macro_f1(said_pairs(self.expected, scores))}


def is_short_label(text: str) -> bool:
    """Return True if a reply is as short as a label."""
    return len(text) <= _MAX_CHARS and len(text.split()) <= _MAX_WORDS


def fold_label(text: str) -> str:
    """Return a label without case, spacing and punctuation around it: ` Card_arrival.` is `card arrival`."""
    folded = _BOLD.sub(r"\2", fold(text).strip().rstrip(".")) or fold(text).strip()
    # A label may consist of punctuation alone, such as `+` and `-`.
    return _SEPARATORS.sub(" ", folded.strip(_AROUND)).strip() or folded
