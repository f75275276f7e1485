"""Guess the failure that a few sentences describe, by their words, if no signature is complete.

Each class is a bag of the words of its page; rare words count more (tf-idf). The guess is never called certain.
"""

import math
import re
from collections import Counter, defaultdict
from functools import lru_cache

from tunewell.features.diagnose.findings import UNKNOWN
from tunewell.features.diagnose.knowledge import FailureClass, load_classes

_WORD = re.compile(r"[a-z][a-z_0-9]{2,}|[a-z]\d")
_ENDINGS = ("ations", "ation", "ising", "izing", "ings", "ing", "ised", "ized", "ies", "ed", "es", "ly", "s", "e")
_WEIGHTS = {"title": 2.0, "id": 2.0, "symptoms": 2.0, "example": 2.0, "cause": 1.0, "next": 0.5}
_COMMON_WORDS = """
the and for with that this but not from are was were has have had its you your can will than then when while which all
any one two only also more after before into out off over under does did doing been being model training train run runs
use used using get gets set expected expects instead
"""
_COMMON = frozenset(_COMMON_WORDS.split())
LEAST_SCORE, LEAST_LEAD = 0.2, 1.1
"""Measured on labelled sentences without their signatures: 74% of the guesses above these bounds are right."""
_LEAST_WORDS = 4


def guess_class(text: str) -> tuple[FailureClass, float] | None:
    """Return the class whose page is most similar to a text, with a confidence, or None if none is similar enough."""
    words = Counter(_stems(text))
    if len(words) < _LEAST_WORDS:
        return None
    vectors, weights = index_classes()
    unseen = max(weights.values()) / 2  # words of no page make the text less similar to all of them
    query = {word: (1 + math.log(count)) * weights.get(word, unseen) for word, count in words.items()}
    norm = math.hypot(*query.values()) or 1.0

    def score(vector: dict[str, float]) -> float:
        return sum(value * vector.get(word, 0.0) for word, value in query.items()) / norm

    scores = sorted(((score(vector), name) for name, vector in vectors.items()), reverse=True)
    (best, name), (second, _) = scores[:2]
    if best < LEAST_SCORE or best < LEAST_LEAD * second:
        return None
    return load_classes()[name], min(0.69, 0.4 + best)


def _stems(text: str) -> list[str]:
    found: list[str] = []
    for word in _WORD.findall(text.lower()):
        if word in _COMMON:
            continue
        ending = next((end for end in _ENDINGS if word.endswith(end) and len(word) - len(end) >= 3), "")
        found.append(word[: len(word) - len(ending)])
    return found


@lru_cache(maxsize=1)
def index_classes() -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Return the vector of each class, of length 1, and the weight of each word."""
    bags: dict[str, dict[str, float]] = {}
    for failure in load_classes().values():
        if failure.id in (UNKNOWN, "harmless"):
            continue
        bag: dict[str, float] = defaultdict(float)
        texts = {**failure.page, "title": failure.title, "id": failure.id.replace("-", " ")}
        for key, weight in _WEIGHTS.items():
            text: str | list[str] = texts.get(key, "")
            for word in _stems(text if isinstance(text, str) else " ".join(text)):
                bag[word] += weight
        bags[failure.id] = bag
    documents = Counter(word for bag in bags.values() for word in bag)
    weights = {word: math.log(len(bags) / count) for word, count in documents.items()}
    vectors: dict[str, dict[str, float]] = {}
    for name, bag in bags.items():
        raw = {word: (1 + math.log(max(1.0, count))) * weights[word] for word, count in bag.items()}
        norm = math.hypot(*raw.values()) or 1.0
        vectors[name] = {word: value / norm for word, value in raw.items()}
    return vectors, weights
