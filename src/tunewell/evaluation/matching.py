"""Compare an answer with its reference: the same, contained on word boundaries, and token F1 as SQuAD counts it."""

import re
import string
import unicodedata
from collections import Counter
from dataclasses import dataclass

SHORT_WORDS = 30
"""Words up to which a reference can be right or wrong: one or two sentences with a fact. What is longer can be said
well in many ways, and then only F1 and the loss tell."""

_INVISIBLE = dict.fromkeys(map(ord, "\u200b\u2060\ufeff\u00ad"))
_ONE_SPELLING = str.maketrans({"’": "'", "‘": "'", "ʼ": "'", "−": "-", "‐": "-", "–": "-", "—": " ", "―": " "})
_SPACELESS = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
"""Thai, Lao, Burmese, Khmer, Kana and Han: scripts that put no spaces between words."""
_SPACELESS_LETTER = re.compile(f"[{_SPACELESS}\U00020000-\U0003ffff]")
_INNER_SPACE = re.compile(f"(?<=[{_SPACELESS}])\\s+(?=[{_SPACELESS}])")
_UNIT_SPACE = re.compile(r"(?<=\d)\s+(?=[%‰°])|(?<=[$€£¥])\s+(?=\d)")
_MEANT = "%‰#&@"
"""Punctuation by its category that is part of what is said: 5%, C#, R&D."""
_POLAR = tuple(
    frozenset(pair.split())
    for pair in (
        "yes no",
        "true false",
        "ja nein",
        "ja nee",
        "ja nej",
        "oui non",
        "sí no",
        "si no",
        "sim não",
        "vrai faux",
        "wahr falsch",
        "verdadero falso",
        "tak nie",
        "да нет",
    )
)
_CLAUSE_END = re.compile(r"[.,;:!?()\[\]\n。，、！？；：]+")


@dataclass(frozen=True)
class Match:
    """How an answer compares with its reference."""

    exact: bool
    """The same but for case, spacing and the punctuation around words."""
    contains: bool
    """The whole reference stands in the answer, on word boundaries."""
    f1: float
    """Overlap of words as SQuAD v1.1 counts it, 0 to 1."""
    right: bool
    """Exact or contained."""


def match(answer: str, reference: str) -> Match:
    """Compare an answer with its reference; to an empty reference nothing is right.

    reference    answer                       exact  contains
    15 January   It is 15 January 2027.              yes
    15 January   15 january                   yes    yes
    5%           It is 15%.                          no
    no           There is no doubt.                  no     <- yes and no count where they are the answer
    """
    wanted, said = _normal(reference), _normal(answer)
    if not wanted:
        return Match(exact=False, contains=False, f1=0.0, right=False)
    exact = said == wanted
    contains = exact or _contains(answer, said, wanted)
    return Match(exact=exact, contains=contains, f1=1.0 if exact else _f1(answer, reference), right=exact or contains)


def is_short_reference(reference: str) -> bool:
    """Say whether a reference is short enough for right and wrong to be a fair measure."""
    text = _normal(reference)
    spaceless = len(_SPACELESS_LETTER.findall(text))
    # A word of Chinese or Japanese is about two characters.
    words = len(_SPACELESS_LETTER.sub(" ", text).split()) + spaceless / 2
    return 0 < words <= SHORT_WORDS


def split_words(text: str) -> list[str]:
    """Split into words without case and punctuation; of scripts without spaces each character is one."""
    letters = (" " if _is_punctuation(letter) else letter for letter in _folded(text))
    return _SPACELESS_LETTER.sub(lambda found: f" {found[0]} ", "".join(letters)).split()


def _folded(text: str) -> str:
    plain = unicodedata.normalize("NFKC", text.translate(_INVISIBLE)).translate(_ONE_SPELLING)
    # Folding can undo the normal form, as for U+0345.
    return unicodedata.normalize("NFKC", plain.casefold())


def _normal(text: str) -> str:
    spaced = _UNIT_SPACE.sub("", _INNER_SPACE.sub("", _folded(text)))
    bare = [word for raw in spaced.split() if (word := _bare(raw))]
    return " ".join(bare or spaced.split())


def _bare(word: str) -> str:
    """Strip the punctuation around a word, but not the sign of a number: `(-5).` is `-5`."""
    begin, end = 0, len(word)
    while end > begin and _is_around(word[end - 1]):
        end -= 1
    while begin < end and _is_around(word[begin]):
        begin += 1
    is_signed = begin > 0 and word[begin - 1] == "-" and word[begin : begin + 1].isdigit()
    # A list's dash stands alone, and a dash after a bracket or a quote is a sign as well.
    return word[begin - is_signed : end]


def _is_around(letter: str) -> bool:
    return letter == "`" or (letter not in _MEANT and unicodedata.category(letter).startswith("P"))


def _contains(answer: str, said: str, wanted: str) -> bool:
    if len(wanted) == 1 and wanted.isascii() and wanted.isalpha():
        # One letter names a choice: "B", "B) Paris", "The answer is B."; the "a" of "a cat" does not.
        named = re.compile(rf"{wanted}|.*\b(is|option|answer|choice) {wanted}|(option|answer|choice) {wanted}\b.*")
        return any(named.fullmatch(clause) for clause in _first(answer))
    if any(wanted in pair for pair in _POLAR):
        return any(
            f" {clause} ".startswith(f" {wanted} ") or clause.endswith(f" {wanted}") for clause in _first(answer)
        )
    start = said.find(wanted)
    while start >= 0:
        if _stands_alone(said, start, start + len(wanted)):
            return True
        start = said.find(wanted, start + 1)
    return False


def _first(answer: str) -> list[str]:
    """Give the first clause of an answer, where it says yes or no; a list, since there may be none."""
    clauses = (_normal(clause) for clause in _CLAUSE_END.split(_folded(answer)))
    return [clause for clause in clauses if clause][:1]


def _stands_alone(text: str, start: int, end: int) -> bool:
    before, after = text[:start][-2:], text[end:][:2]
    first, last = text[start], text[end - 1]
    return not (_runs_on_before(before, first, text[start:end]) or _runs_on_after(after, last, text[start:end]))


def _runs_on_before(before: str, first: str, wanted: str) -> bool:
    """Say whether what begins with `first` is the end of a longer word or number."""
    if not before:
        return False
    near, far = before[-1], before[:-1]
    if _SPACELESS_LETTER.match(first):
        # 是 is not contained in 不是.
        return len(wanted) <= 2 and near in "不没沒非未無无"
    if first.isdigit():
        is_joined = near in ".,:/'" and far.isdigit()
        is_negative = near == "-" and not far.isalpha()
        return is_joined or is_negative or _is_word(near)
    if first == "-":
        return _is_word(near)
    if first.isalnum():
        return _is_word(near) or (near == "-" and len(wanted) <= 3)
    return False


def _runs_on_after(after: str, last: str, wanted: str) -> bool:
    """Say whether what ends with `last` is the beginning of a longer word or number."""
    if not after or _SPACELESS_LETTER.match(last):
        return False
    near, far = after[0], after[1:]
    if last.isdigit():
        return _is_word(near) or (near in ".,:/'-" and far.isdigit())
    if not last.isalnum():
        return False
    is_contraction = near == "'" and far.isalpha() and far != "s"
    return _is_word(near) or is_contraction or near in "#+" or (near == "-" and len(wanted) <= 3)


def _is_word(letter: str) -> bool:
    # Marks belong to the letter they follow, as in Devanagari and Arabic.
    is_letter = letter.isalnum() or letter == "_" or unicodedata.category(letter).startswith("M")
    return is_letter and not _SPACELESS_LETTER.match(letter)


def _f1(answer: str, reference: str) -> float:
    said, wanted = _squad_words(answer), _squad_words(reference)
    same = sum((Counter(said) & Counter(wanted)).values())
    if not same:
        return 0.0
    precision, recall = same / len(said), same / len(wanted)
    return 2 * precision * recall / (precision + recall)


def _squad_words(text: str) -> list[str]:
    """Split as SQuAD v1.1 does: lower case, no punctuation, no articles; scripts without spaces by character."""
    # The articles go by word boundary after the punctuation is gone, in this order, as in the official script.
    bare = "".join(letter for letter in _folded(text) if not _is_punctuation(letter))
    return _SPACELESS_LETTER.sub(lambda found: f" {found[0]} ", re.sub(r"\b(a|an|the)\b", " ", bare)).split()


def _is_punctuation(letter: str) -> bool:
    return letter in string.punctuation or unicodedata.category(letter).startswith("P")
