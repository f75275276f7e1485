"""Guess the failure that a few sentences describe, by their words, if no signature is complete.

Each class is a bag of the words of its page; rare words count more (tf-idf). The guess is never called certain.
"""

import math
import re
from collections import Counter
from functools import cache

from tunewell.features.diagnose.findings import UNKNOWN
from tunewell.features.diagnose.knowledge import FailureClass, load_classes

_WORD = re.compile(r"[a-z][a-z_0-9]{2,}|[a-z]\d")
_COMMON_WORDS = """
the and for with that this but not from are was were has have had its you your can will than then when while which all
any one two only also more after before into out off over under does did doing been being model training train run runs
use used using get gets set expected expects instead
"""
_COMMON = frozenset(_COMMON_WORDS.split())
_STEM = 7
"""Letters of a word that count, in place of its stem."""
_PARTS = ("title", "symptoms", "example", "cause")
_LEAST_SCORE, _LEAST_LEAD = 0.2, 1.1
_LEAST_WORDS = 6


def guess_class(text: str) -> tuple[FailureClass, float] | None:
    """Return the class whose page is most similar to a text, with a confidence, or None if none is similar enough."""
    words = _words(text)
    if len(words) < _LEAST_WORDS:
        return None
    bags, weights = _bags()
    unseen = max(weights.values()) / 2  # words of no page make the text less similar to all of them
    asked = _vector(words, weights, unseen)
    scores = {name: sum(asked[word] * bag.get(word, 0.0) for word in asked) for name, bag in bags.items()}
    (name, best), (_, second) = Counter(scores).most_common(2)
    if best < _LEAST_SCORE or best < _LEAST_LEAD * second:
        return None
    return load_classes()[name], min(0.69, 0.4 + best)


def _words(text: str) -> Counter[str]:
    return Counter(word[:_STEM] for word in _WORD.findall(text.lower()) if word not in _COMMON)


def _vector(words: Counter[str], weights: dict[str, float], unseen: float = 0.0) -> dict[str, float]:
    """Return the weight of each word, as a vector of length 1."""
    raw = {word: (1 + math.log(number)) * weights.get(word, unseen) for word, number in words.items()}
    length = math.hypot(*raw.values()) or 1.0
    return {word: value / length for word, value in raw.items()}


@cache
def _bags() -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Return the vector of each class, and the weight of each word."""
    words = {
        name: _words(" ".join(map(str, (failure.title, *(failure.page.get(part, "") for part in _PARTS)))))
        for name, failure in load_classes().items()
        if name not in (UNKNOWN, "harmless")
    }
    number = Counter(word for bag in words.values() for word in bag)
    weights = {word: math.log(len(words) / times) for word, times in number.items()}
    return {name: _vector(bag, weights) for name, bag in words.items()}, weights
