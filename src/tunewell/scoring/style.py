"""Conversations: no reply is right or wrong, so the style of the replies is compared with that of the expected ones."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean, median

from tunewell.core.text import split_words
from tunewell.scoring.base import ReferenceRow, Score
from tunewell.scoring.free_text import FreeText

WORDS = "words per reply"
"""The only figure that is a number of words; the others are shares of the replies."""
_EMOJI = re.compile("[\U0001f1e6-\U0001f1ff\U0001f300-\U0001faff\u2600-\u27bf\u2b50]")
_REPEATED = re.compile(r"[!?.]{2,}|\u2026")
_NUM_TYPICAL, _NUM_NAMED = 20, 3
_MIN_TIMES, _MIN_LEAD = 2, 3.0
"""A typical word is in this many replies at least, and in this many times as many as questions."""


class ChatStyle(FreeText):
    """Replies of a person or an assistant, whose style is measured."""

    def __init__(self, asked: Sequence[ReferenceRow], training: Sequence[ReferenceRow]) -> None:
        super().__init__(asked, training)
        self._known = {_plain(row.reference) for row in training}
        self._typical = _typical_words(training)

    def measures(self, scores: Sequence[Score]) -> dict[str, float]:
        """Return nothing: the figures of the style include the length."""
        return {}

    def figures(self, texts: Sequence[str]) -> dict[str, float]:
        """Return the style of some replies: their median length, and the share of those with a trait."""
        texts = [text.strip() for text in texts if text.strip()]
        if not texts:
            return {}
        shares = {
            "with emoji": map(_EMOJI.search, texts),
            "with !!, ?? or ...": map(_REPEATED.search, texts),
            "without a final mark": (text[-1].isalnum() for text in texts),
            "beginning in lower case": (text[0].islower() for text in texts),
        }
        if self._typical:
            words = ", ".join(self._typical[:_NUM_NAMED])
            shares[f"with a typical word ({words})"] = (bool({*self._typical} & {*split_words(text)}) for text in texts)
        if self._known:
            shares["equal to a training reply"] = (_plain(text) in self._known for text in texts)
        length = float(median(len(text.split()) for text in texts))
        return {WORDS: length} | {name: fmean(map(bool, found)) for name, found in shares.items()}


def _plain(text: str) -> tuple[str, ...]:
    return tuple(split_words(text))


def _typical_words(training: Sequence[ReferenceRow]) -> list[str]:
    """Return the words that are far more frequent in the replies than in the questions, most frequent first."""
    own = _num_texts(row.reference for row in training)
    other = _num_texts(row.question for row in training)
    leading = [
        word
        for word, number in own.most_common()
        if number >= max(_MIN_TIMES, _MIN_LEAD * other[word]) and any(map(str.isalpha, word))
    ]
    return leading[:_NUM_TYPICAL]


def _num_texts(texts: Iterable[str]) -> Counter[str]:
    """Return in how many texts each word is."""
    return Counter(word for text in texts for word in set(split_words(text)))
