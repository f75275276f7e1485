"""Check an answer against the passages that were shown: citations, quotes, refusals, and the sentence to quote."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tunewell.data.reading_prompt import CITATION, Passage

_QUOTE = re.compile(r"[\"“„»]([^\"“”„«»\n]{12,400})[\"”«]")
_MIN_QUOTED_WORDS = 3
_WORD = re.compile(r"[^\W_]+(?:[.,:'’-][^\W_]+)*")
_SENTENCE_START = re.compile(r"(?:^|[.!?:\n])[\s*\-\"“„»]*[^\W\d_][\w'’-]*")
"""The first word of a sentence, which begins with a capital whether it is a name or not."""
_SENTENCE = re.compile(r"(?<=[.!?。！？])\s+|\n\s*\n|\n(?=\s*(?:[-*+•|]|\d+[.)]|\w+:) )")


@dataclass(frozen=True)
class Claims:
    """The sources and quotes in an answer, and those of them that do not exist."""

    cited: tuple[int, ...]
    """Numbers of shown passages that the answer names."""
    unknown: tuple[int, ...]
    """Numbers that the answer names but no passage has."""
    false_quotes: tuple[str, ...]
    """Words in quotation marks that are in no shown passage."""


def check_claims(answer: str, passages: Sequence[Passage]) -> Claims:
    """Compare the citations and quotes of an answer with the passages that were shown."""
    numbers = list(dict.fromkeys(int(one) for found in CITATION.findall(answer) for one in re.findall(r"\d+", found)))
    texts = [_squashed(passage.searched) for passage in passages]
    quotes = [quote for quote in _QUOTE.findall(answer) if len(quote.split()) >= _MIN_QUOTED_WORDS]
    return Claims(
        tuple(number for number in numbers if 1 <= number <= len(passages)),
        tuple(number for number in numbers if not 1 <= number <= len(passages)),
        tuple(quote for quote in quotes if not any(_squashed(quote) in text for text in texts)),
    )


def unsupported(answer: str, question: str, passages: Sequence[Passage]) -> list[tuple[str, list[str]]]:
    """Return each citation whose passages lack numbers or names of its claim, with these words.

    A claim is the text from the last citation to this one. Words of the question are no claim of the answer.
    """
    found: list[tuple[str, list[str]]] = []
    end, asked = 0, set(_WORD.findall(question.lower()))
    for citation in CITATION.finditer(answer):
        claim, end = answer[end : citation.start()], citation.end()
        numbers = [int(one) for one in re.findall(r"\d+", citation[0])]
        texts = (passages[own - 1].searched.lower() for own in numbers if 1 <= own <= len(passages))
        text = set(_WORD.findall(" ".join(texts)))
        words = [own for own in _WORD.findall(_SENTENCE_START.sub(" ", claim)) if own[0].isupper() or own[0].isdigit()]
        missing = [own for own in words if own.lower() not in asked | text]
        if text and missing:
            found.append((citation[0], list(dict.fromkeys(missing))))
    return found


def best_sentence(passage: Passage, answer: str, question: str) -> str:
    """Return the sentence or line of a passage that shares most words with the answer, to be quoted as evidence."""
    wanted = set(re.findall(r"\w+", answer.lower()))
    asked = set(re.findall(r"\w+", question.lower()))
    sentences = [part.strip() for part in _SENTENCE.split(passage.text) if part.strip()] or [passage.text]

    def overlap(sentence: str) -> tuple[float, float]:
        words = set(re.findall(r"\w+", sentence.lower()))
        return len(words & (wanted - asked)) + 0.25 * len(words & wanted & asked), -len(words)

    return max(sentences, key=overlap)


def _squashed(text: str) -> str:
    return " ".join(text.lower().split())
