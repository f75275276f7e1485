"""Compare an answer with its reference: exact match, containment on word boundaries, token F1 as in SQuAD; refusals."""

import re
import unicodedata
from collections import Counter
from dataclasses import dataclass
from functools import cache, lru_cache

from tunewell.core.text import SPACELESS, SPACELESS_LETTER, fold, is_punctuation, space_out
from tunewell.scoring.words import read_lines

SHORT_WORDS = 30
"""Maximum number of words in a reference for which an answer counts as right or wrong: one or two sentences with a
fact. Longer references can be worded in many ways, so only F1 and the loss are measured."""

_SOURCES = "(?:document|text|context|passage|source|article|page|information|material|excerpt|data)s?"
_DENIAL = re.compile(
    r"\b(?:is|are|was|were)(?: not|n't) (?:\w+ )?(?:provided|given|listed|included|available|found|known|described)\b"
    r"|\b(?:i|we) (?:cannot|can't|can not) (?:provide|help)\b"
)
"""Statements that are a refusal as an answer, but may be a fact in a reference: "Books are not included"."""
_INNER_SPACE = re.compile(f"(?<=[{SPACELESS}])\\s+(?=[{SPACELESS}])")
_UNIT_SPACE = re.compile(r"(?<=\d)\s+(?=[%‰°])|(?<=[$€£¥])\s+(?=\d)")
_MEANINGFUL = "%‰#&@"
"""Characters of the Unicode category punctuation that are part of a word: 5%, C#, R&D."""
_POLAR = re.compile(
    "yes|no|true|false|ja|nein|nee|nej|oui|non|sí|si|sim|não|vrai|faux|wahr|falsch|verdadero|falso|tak|nie|да|нет"
)
_CLAUSE_END = re.compile(r"[.,;:!?()\[\]\n。，、！？；：]+")


@dataclass(frozen=True)
class Match:
    """The result of comparing an answer with its reference."""

    exact: bool
    """Whether the two are equal except for case, spacing and the punctuation around words."""
    contains: bool
    """Whether the answer contains the whole reference on word boundaries, and so is right."""
    f1: float
    """Word overlap as in SQuAD v1.1, 0 to 1."""


def match(answer: str, reference: str) -> Match:
    """Compare an answer with its reference. If the reference is empty, no answer is right.

    reference    answer                       exact  contains
    15 January   It is 15 January 2027.              yes
    15 January   15 january                   yes    yes
    5%           It is 15%.                          no
    no           There is no doubt.                  no     <- "no" counts only as the answer itself
    """
    expected, found = _normal(reference), _normal(answer)
    if not expected:
        return Match(exact=False, contains=False, f1=0.0)
    if found == expected:
        return Match(exact=True, contains=True, f1=1.0)
    return Match(exact=False, contains=_contains(answer, found, expected), f1=_f1(answer, reference))


def is_short_reference(reference: str) -> bool:
    """Return True if a reference is short enough for answers to count as right or wrong."""
    text = _normal(reference)
    spaceless = len(SPACELESS_LETTER.findall(text))
    # A Chinese or Japanese word has about two characters.
    words = len(SPACELESS_LETTER.sub(" ", text).split()) + spaceless / 2
    return 0 < words <= SHORT_WORDS


@lru_cache(maxsize=4096)  # retrieval judges each passage by the keys of many questions
def is_refusal(text: str, *, is_answer: bool = False) -> bool:
    """Return True if a text says that the answer is not known or not in the documents, in the commonest languages."""
    folded = fold(text)
    return _refusals().search(folded) is not None or (is_answer and _DENIAL.search(folded) is not None)


@cache
def _refusals() -> re.Pattern[str]:
    patterns = [line.partition(": ")[2] for line in read_lines("refusals.txt")]
    return re.compile("|".join(patterns).replace("SOURCES", _SOURCES))


def _normal(text: str) -> str:
    spaced = _UNIT_SPACE.sub("", _INNER_SPACE.sub("", fold(text)))
    bare = [word for raw in spaced.split() if (word := _bare(raw))]
    return " ".join(bare or spaced.split())


def _bare(word: str) -> str:
    """Strip the punctuation around a word, but keep the sign of a number: `(-5).` becomes `-5`."""
    inside = [index for index, letter in enumerate(word) if not _is_around(letter)]
    begin, end = (inside[0], inside[-1] + 1) if inside else (0, 0)
    # The dash of a list item is separated by a space; a dash after a bracket or a quote is a sign.
    is_signed = begin > 0 and word[begin - 1] == "-" and word[begin].isdigit()
    return word[begin - is_signed : end]


def _is_around(letter: str) -> bool:
    return letter == "`" or (letter not in _MEANINGFUL and unicodedata.category(letter).startswith("P"))


def _contains(answer: str, found: str, expected: str) -> bool:
    """Return True if the normalised answer `found` contains the normalised reference `expected`."""
    first = _first_clause(answer)
    if len(expected) == 1 and expected.isascii() and expected.isalpha():
        # A single letter must be a choice: "B", "B) Paris", "The answer is B.", but not the "a" of "a cat".
        named = (
            rf"{expected}(?: (?:because|since|as)\b.*)?|.*\b(is|option|answer|choice) {expected}"
            rf"|(option|answer|choice) {expected}\b.*"
        )
        return re.fullmatch(named, first) is not None
    if _POLAR.fullmatch(expected):
        return f" {first} ".startswith(f" {expected} ") or first.endswith(f" {expected}")
    starts = (place.start() for place in re.finditer(f"(?={re.escape(expected)})", found))
    return any(stands_alone(found, start, start + len(expected)) for start in starts)


def _first_clause(answer: str) -> str:
    """Return the normalised first clause of an answer, which contains a yes or no, or "" for an empty answer."""
    return next(filter(None, map(_normal, _CLAUSE_END.split(fold(answer)))), "")


def stands_alone(text: str, start: int, end: int) -> bool:
    """Return True if a part of a text is neither the end nor the beginning of a longer word or number."""
    part = text[start:end]
    return not (_runs_on_before(text[:start][-2:], part) or _runs_on_after(part, text[end:][:2]))


def _runs_on_before(before: str, part: str) -> bool:
    """Return True if a part is the end of a longer word or number that begins with `before`."""
    if not before:
        return False
    near, far, first = before[-1], before[:-1], part[0]
    if SPACELESS_LETTER.match(first):
        # 不是 does not contain 是.
        return len(part) <= 2 and near in "不没沒非未無无"
    if first.isdigit():
        is_joined = near in ".,:/'" and far.isdigit()
        is_negative = near == "-" and not far.isalpha()
        return is_joined or is_negative or _is_word(near)
    if first == "-":
        return _is_word(near)
    if first.isalnum():
        return _is_word(near) or (near == "-" and len(part) <= 3)
    return False


def _runs_on_after(part: str, after: str) -> bool:
    """Return True if a part is the beginning of a longer word or number that ends with `after`."""
    last = part[-1]
    if not after or SPACELESS_LETTER.match(last):
        return False
    near, far = after[0], after[1:]
    if last.isdigit():
        return _is_word(near) or (near in ".,:/'-" and far.isdigit())
    if not last.isalnum():
        return False
    is_contraction = near == "'" and far.isalpha() and far != "s"
    return _is_word(near) or is_contraction or near in "#+" or (near == "-" and len(part) <= 3)


def _is_word(letter: str) -> bool:
    # Combining marks belong to the letter before them, as in Devanagari and Arabic.
    is_letter = letter.isalnum() or letter == "_" or unicodedata.category(letter).startswith("M")
    return is_letter and not SPACELESS_LETTER.match(letter)


def _f1(answer: str, reference: str) -> float:
    found, expected = Counter(_squad_words(answer)), Counter(_squad_words(reference))
    return 2 * (found & expected).total() / max(1, found.total() + expected.total())


def _squad_words(text: str) -> list[str]:
    """Split text as SQuAD v1.1 does: lower case, no punctuation or articles; by character in scripts without spaces."""
    # Punctuation is removed before articles, as in the official script.
    bare = "".join(letter for letter in fold(text) if not is_punctuation(letter))
    return space_out(re.sub(r"\b(a|an|the)\b", " ", bare)).split()
