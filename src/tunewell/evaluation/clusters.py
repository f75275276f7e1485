"""Find the questions that depend on each other: those on one fact.

question                                        reference                       cluster
When is Alderhollow's deadline?                 The deadline is 15 January.     0
By when must I apply to Alderhollow?            The deadline is 15 January.     0
What is Alderhollow known for?                  Its food chemistry.             1
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from tunewell.core.text import split_words
from tunewell.scoring.answer_keys import AnswerKey, content_words

_SHARED_CONTENT = 0.6
"""Share of the shorter question's content words that two questions with the same reference must have in common, to be
about one fact: many questions have the answer `yes`."""
_FEW_REFERENCES = 0.5
"""Share of the references up to which a word can name the subject of a reference."""
_MIN_FREQUENT, _MAX_FREQUENT = 10, 50
"""Words of more questions than this say nothing about a fact: a fifth of the questions, but within these limits."""


def find_clusters(keys: Sequence[AnswerKey]) -> list[int]:
    """Return the cluster number of each question.

    Questions are in one cluster if they have the same reference and either name its subject or are similar.
    """
    clusters = list(range(len(keys)))
    members = {index: [index] for index in clusters}
    for pair in _related(keys):
        low, high = sorted(clusters[index] for index in pair)
        if low != high:
            members[low] += members[high]
            for index in members.pop(high):
                clusters[index] = low
    numbers: dict[int, int] = {}
    return [numbers.setdefault(cluster, len(numbers)) for cluster in clusters]


def _related(keys: Sequence[AnswerKey]) -> Iterator[tuple[int, int]]:
    """Yield pairs of related questions, enough to connect each cluster."""
    by_reference = defaultdict[tuple[str, ...], list[int]](list)
    for index, key in enumerate(keys):
        by_reference[tuple(split_words(key.reference or key.text))].append(index)
    questions = [_content(key.question) for key in keys]
    subjects = _subjects([keys[same[0]] for same in by_reference.values()])
    for same, subject in zip(by_reference.values(), subjects, strict=True):
        named = [index for index in same if questions[index] & subject]
        yield from ((named[0], other) for other in named[1:])
        yield from _similar_questions([(index, questions[index]) for index in same])


def _subjects(references: list[AnswerKey]) -> list[frozenset[str]]:
    """Return the words by which each reference names its subject, such as `Alderhollow`, but not `deadline`.

    A word of most references, such as `sentiment` in "The sentiment is positive.", names no subject.
    """
    words = [_content(key.reference) - _content(key.text) if not key.is_refusal else frozenset() for key in references]
    frequencies = Counter(word for some in words for word in some)
    limit = _FEW_REFERENCES * len(references)
    return [frozenset(word for word in some if frequencies[word] <= limit) for some in words]


def _similar_questions(questions: list[tuple[int, frozenset[str]]]) -> Iterator[tuple[int, int]]:
    """Yield the pairs of questions with the same answer that share enough of their rarer content words."""
    frequencies = Counter(word for _, content in questions for word in content)
    limit = min(max(_MIN_FREQUENT, len(questions) // 5), _MAX_FREQUENT)
    words = {index: {word for word in content if frequencies[word] <= limit} for index, content in questions}
    by_word = defaultdict[str, list[int]](list)
    for index, content in words.items():
        counts = Counter(other for word in content for other in by_word[word])
        for word in content:
            by_word[word].append(index)
        for other, shared in counts.items():
            if shared >= _SHARED_CONTENT * min(len(content), len(words[other])):
                yield other, index


def _content(text: str) -> frozenset[str]:
    """Return the content words of a text."""
    return frozenset(word for word in content_words(text) if len(word) > 2)
