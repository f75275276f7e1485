"""Find the answer key of each question: the part of the reference that an answer must contain to be right.

question   By when must an application reach Alderhollow College?
reference  The application deadline of Alderhollow College is 15 January.
others     The application deadline of Thornquist College is 8 December.      <- the same form with other values
key        15 January

The key is taken from the row's `answers` or `value`. Otherwise it is derived: the words of the reference that the
question lacks and that most references of the same form do not share.
"""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import pairwise
from statistics import median
from typing import Literal

from tunewell.core.text import SPACELESS, detect_language, fold, function_words
from tunewell.core.units import count
from tunewell.scoring.answer_values import Value, find_values
from tunewell.scoring.base import ReferenceRow
from tunewell.scoring.matching import is_refusal, is_short_reference
from tunewell.scoring.number import marked_results
from tunewell.scoring.words import word_lists, word_set

Origin = Literal["answers", "value", "derived", "whole reference"]

MAX_KEY_WORDS = 6
"""Maximum number of words in a derived key. A longer one is a free text, which can be worded in many ways."""
_MIN_OVERLAP = 0.35
"""Minimum share of its word pairs that a reference must have in common with another one of the same form."""
_NEAR_MEDIAN = 0.7
"""Minimum overlap of a reference of the same form, compared with the median of those that overlap enough. The largest
overlap is no measure: it belongs to a reference with the same value."""
_MAX_SIMILAR = 32
_SHARED = 0.5
"""Share of the similar references from which a word belongs to their common form."""
_NEARLY_ALL = 0.95
"""The same share if no word is below `_SHARED`, because most references have the same value."""
_SAMPLE = 200
_MAX_VALUES = 12
_WORD = re.compile(rf"[{SPACELESS}]|[^\W_]+(?:['’-][^\W_]+)*")
_NEGATIONS, _CONJUNCTIONS = word_set("negations"), word_set("conjunctions")
_CITATION = re.compile(r"(?<=\S)\s*\[\d{1,3}\]\s*$")
"""The number of a passage after an answer. It is not part of the answer."""
_POLAR_START = re.compile(
    r"\s*(yes|no|maybe|ja|nein|oui|non|sí|sim|não|nee|да|нет)(?:\s*[.,;:!]+(?!\s*\d)|\s*$|\s*[-\n])", re.IGNORECASE
)
_ASKS_VALUE = re.compile(
    r"\b(when|how (?:much|many|long|old|late|high|large|big|far|expensive)|(?:what|which) (?:date|day|time|year|amount|"
    r"price|percentage|share|number|rate|sum)|deadline|wann|wie ?viele?|wie lange|quand|combien|cuándo|cuántos?|quando|"
    r"quanto)\b",
    re.IGNORECASE,
)
_ASKS_NAME = re.compile(
    r"\b(who|whom|whose|where|why|wer|wo|wen|qui|où|quién|dónde|chi|dove|quem|onde)\b", re.IGNORECASE
)
_ASKS_PERSON = re.compile(r"\b(who|whom|whose|wer|wen|wem|qui|quién|chi|quem)\b", re.IGNORECASE)
_PERSON = re.compile(r"(?!(?:Dr|Prof|Professor|Mrs?|Ms)\b)[^\W\d_a-zß-ÿ][\w'’-]+(?:.*\s[^\W\d_a-zß-ÿ][\w'’-]*)?")
"""From the first to the last capitalised word, without a title."""
ASKS_POLAR = re.compile(
    r"\s*(?:is|are|was|were|do|does|did|can|could|will|would|should|may|must|has|have|had)\b(?!.*\bor\b)", re.IGNORECASE
)


@dataclass(frozen=True)
class AnswerKey:
    """What an answer must contain to be right."""

    accepted: tuple[tuple[str, ...], ...]
    """Alternatives; an answer must contain all parts of one of them. Empty if answers cannot be judged."""
    origin: Origin
    because: str
    question: str = ""
    reference: str = ""
    rivals: tuple[str, ...] = ()
    """Keys of references of the same form: an answer that lists several of them is wrong."""
    is_final: bool = False
    """Whether only the final result of an answer counts, as in `#### 42`."""
    is_polar: bool = False
    """Whether the key is yes, no or maybe."""
    is_refusal: bool = False
    """Whether the right answer is a refusal, because the documents do not contain the answer."""

    @property
    def text(self) -> str:
        """The key for people: `15 January`, or `teaching + library` if an answer needs several parts."""
        return " | ".join(" + ".join(parts) for parts in self.accepted)

    @property
    def first_parts(self) -> list[str]:
        """The first part of each alternative."""
        return [parts[0] for parts in self.accepted]

    @property
    def is_judged(self) -> bool:
        """Whether answers can be right or wrong."""
        return bool(self.accepted) or self.is_refusal


def answer_keys(rows: Sequence[ReferenceRow], *, others: Sequence[str] = ()) -> list[AnswerKey]:
    """Return the key of each row; `others` are more references of the same corpus, such as those of training rows."""
    rows = [replace(row, reference=_CITATION.sub("", row.reference)) for row in rows]
    frames = _Frames([*(row.reference for row in rows), *(_CITATION.sub("", text) for text in others)])
    keys = [_given_key(row) or _marked_key(row) or _derived_key(row, frames) for row in rows]
    simple = [key for key in keys if sum(map(len, key.accepted)) == 1]
    texts = {frames.number(key.reference): key.text for key in simple}
    values = Counter(key.text for key in simple)
    # A few values that nearly all rows have, such as colours, are rivals whatever the form of their references is.
    is_few = 2 <= len(values) <= _MAX_VALUES and len(simple) >= max(3 * len(values), len(keys) / 2)
    found = []
    for key in keys:
        rivals = {texts[other] for other in frames.similar(key.reference) if other in texts}
        if is_few and key.text in values:
            rivals |= values.keys()
        found.append(replace(key, rivals=tuple(sorted(rivals - {key.text}))))
    return found


def _given_key(row: ReferenceRow) -> AnswerKey | None:
    answers = tuple(dict.fromkeys(text.strip() for text in row.answers if text.strip()))
    if not answers:
        return None
    return AnswerKey(
        tuple((text,) for text in answers),
        row.origin,
        f"the row has `{row.origin}`",
        row.question,
        row.reference,
        is_final=bool(marked_results(row.reference)),
        is_polar=all(polarity(text) is not None for text in answers),
        is_refusal=all(is_refusal(text) for text in answers),
    )


def _marked_key(row: ReferenceRow) -> AnswerKey | None:
    """Return the key of a reference that marks its result: `#### 42`, `Yes, because ...`, or a refusal."""
    reference = row.reference.strip()
    asked = (row.question, row.reference)
    if marked := marked_results(reference):
        text = marked[-1].strip()
        return AnswerKey(((text,),), "derived", "the marked result of the reference", *asked, is_final=True)
    if is_refusal(reference) and is_short_reference(reference):
        return AnswerKey(((reference,),), "whole reference", "the reference is a refusal", *asked, is_refusal=True)
    if found := _POLAR_START.match(reference):
        is_whole = found.end() >= len(reference)
        because = "the reference is the answer" if is_whole else "the reference begins with it"
        origin: Origin = "whole reference" if is_whole else "derived"
        return AnswerKey(((found[1].lower(),),), origin, because, *asked, is_polar=True)
    return None


def _derived_key(row: ReferenceRow, frames: "_Frames") -> AnswerKey:
    asked = (row.question, row.reference)
    if not is_short_reference(row.reference):
        return AnswerKey((), "whole reference", "the reference is too long to compare", *asked)
    parts, num_similar = frames.distinctive_parts(row)
    spans = _choose_parts(parts, row.question, has_form=num_similar > 0)
    words = sum(len(_WORD.findall(span.text)) for span in spans if span.value is None)
    if not spans and (said := _polar_statement(row)):
        return AnswerKey(((said,),), "derived", "a yes-or-no question", *asked, is_polar=True)
    texts, whole = tuple(span.text for span in spans), row.reference.strip()
    if not spans:
        because = "the reference has no part of its own"
    elif words > MAX_KEY_WORDS:
        because = f"the distinctive part has {words} words"
    elif fold(whole).strip(" .!") == fold(" ".join(texts)):
        because = "the reference is the answer"
    else:
        others = f" or in {count(num_similar, 'reference')} of the same form" if num_similar else ""
        return AnswerKey((texts,), "derived", f"not in the question{others}", *asked)
    return AnswerKey(((whole,),), "whole reference", because, *asked)


@dataclass(frozen=True)
class _Token:
    """A word or a value of a text."""

    word: str
    """The folded word, or the token of a value."""
    text: str
    start: int
    end: int
    value: Value | None = None

    @property
    def form(self) -> str:
        """The word in the form of a reference, in which all values of a kind are equal."""
        return self.word if self.value is None else f"={self.value.kind}"


def split_tokens(text: str) -> list[_Token]:
    """Split a text into words and values."""
    tokens, begin = [], 0
    for value in [*find_values(text), None]:
        words = _WORD.finditer(text, begin, len(text) if value is None else value.start)
        tokens += [_Token(_stem(found[0]), found[0], *found.span()) for found in words]
        if value is not None:
            tokens.append(_Token(value.token, text[value.start : value.end], value.start, value.end, value))
            begin = value.end
    return tokens


def words_of(text: str) -> set[str]:
    """Return the folded words and values of a text."""
    return {fold(token.text) for token in split_tokens(text)}


def content_words(text: str) -> set[str]:
    """Return the stems of a text, without English function words."""
    return {token.word for token in split_tokens(text) if fold(token.text) not in function_words()["en"]}


@lru_cache(maxsize=1 << 16)
def _stem(word: str) -> str:
    """Return a folded word without the ending of a plural or of a possessive."""
    bare = fold(word).removesuffix("'s")
    return bare[:-1] if len(bare) > 3 and bare.endswith("s") and not bare.endswith("ss") else bare


class _Frames:
    """The distinct references of a corpus, and for each of them the others of the same form."""

    def __init__(self, references: Sequence[str]) -> None:
        distinct: dict[str, int] = {}
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}
        for text in filter(is_short_reference, dict.fromkeys(references)):
            self._numbers[text] = number = distinct.setdefault(fold(text).strip(), len(distinct))
            if number == len(self.texts):
                self.texts.append(unicodedata.normalize("NFKC", text))
        self._tokens = [split_tokens(text) for text in self.texts]
        self._words = [frozenset(token.word for token in tokens) for tokens in self._tokens]
        forms = [["^", *(token.form for token in tokens), "$"] for tokens in self._tokens]
        self._pairs = [frozenset(pairwise(one)) for one in forms]
        self._frequencies = Counter(pair for pairs in self._pairs for pair in pairs)
        self._postings = defaultdict[tuple[str, str], list[int]](list)
        for number, pairs in enumerate(self._pairs):
            for pair in pairs:
                if len(self._postings[pair]) <= _MAX_SIMILAR:
                    self._postings[pair].append(number)
        self._similar = cache(self._find_similar)

    @cached_property
    def function_words(self) -> frozenset[str]:
        """The function words of the references' language, or of English."""
        language = detect_language(" ".join(self.texts[:_SAMPLE])) or "en"
        words = function_words().get(language, function_words()["en"])
        return frozenset(map(_stem, words | word_set("english") if language == "en" else words))

    def number(self, reference: str) -> int:
        """Return the number of a reference, or -1 if it is long."""
        return self._numbers.get(reference, -1)

    def similar(self, reference: str) -> list[int]:
        """Return the numbers of the references that have the same form as this one."""
        number = self.number(reference)
        return self._similar(number) if number >= 0 else []

    def _find_similar(self, number: int) -> list[int]:
        pairs = self._pairs[number]
        # The pairs of the form are more frequent than those of the value.
        frequent = sorted(pairs, key=lambda pair: (-self._frequencies[pair], pair))[: (len(pairs) + 1) // 2]
        candidates = {other for pair in frequent for other in self._postings[pair]} - {number}
        overlaps = [
            (other, len(pairs & theirs) / max(len(pairs), len(theirs)))
            for other in sorted(candidates)
            if (theirs := self._pairs[other])
        ]
        enough = [overlap for _, overlap in overlaps if overlap >= _MIN_OVERLAP]
        least = max(_MIN_OVERLAP, _NEAR_MEDIAN * median(enough or [1.0]))
        return [other for other, overlap in overlaps if overlap >= least][:_MAX_SIMILAR]

    def distinctive_parts(self, row: ReferenceRow) -> tuple[list[_Token], int]:
        """Return the parts of a reference that the question lacks and similar references do not share.

        The second result is the number of these references, or 0 if the parts are only those that the question lacks.
        """
        number, similar = self.number(row.reference), self.similar(row.reference)
        asked = {token.word for token in split_tokens(unicodedata.normalize("NFKC", row.question))}
        common = Counter(word for other in similar for word in self._words[other])
        for limit in (_SHARED, _NEARLY_ALL) if similar else ():
            known = asked | {word for word, times in common.items() if times >= limit * len(similar)}
            if parts := self._join(number, known):
                return parts, len(similar)
        return self._join(number, asked), 0

    def _join(self, number: int, known: set[str]) -> list[_Token]:
        """Return the words that are not known as parts; neighbours form one part, with function words between them."""
        text, tokens, common = self.texts[number], self._tokens[number], self.function_words - _NEGATIONS
        is_key = [token.word not in known and (token.value is not None or token.word not in common) for token in tokens]
        parts: list[_Token] = []
        last = -1
        for index, token in enumerate(tokens):
            if not is_key[index]:
                continue
            part, between = parts[-1] if parts else token, tokens[last + 1 : index]
            is_near = len(between) <= 2 and all(one.word in self.function_words - _CONJUNCTIONS for one in between)
            is_split = part.value or token.value or re.search(r"[,;:.!?()\n]", text[part.end : token.start])
            if parts and is_near and not is_split:
                parts[-1] = _Token("", text[part.start : token.end], part.start, token.end)
            else:
                parts.append(replace(token, word=""))
            last = index
        only_negation = all(part.value is None and _stem(part.text) in _NEGATIONS for part in parts)
        return [] if only_negation else parts


def _choose_parts(parts: list[_Token], question: str, *, has_form: bool) -> list[_Token]:
    """Leave out the parts that the question does not ask for: a date for `who`, words for `how much`."""
    values, words = [part for part in parts if part.value], [part for part in parts if not part.value]
    if _ASKS_PERSON.search(question):
        # The first word of a sentence is capitalised in any case.
        people = [replace(one, text=name[0]) for one in words if one.start and (name := _PERSON.search(one.text))]
        if people:
            return people
    if not values or not words:
        return parts
    if _ASKS_NAME.search(question):
        return words
    return values if _ASKS_VALUE.search(question) or (not has_form and len(values) == 1) else parts


_POLARITY_OF = {word: name for name in ("yes", "no", "maybe") for word in word_lists()[name]}


def polarity(text: str) -> str | None:
    """Return yes, no or maybe for a text that is one such word, otherwise None."""
    return _POLARITY_OF.get(fold(text).strip(" .!,;:'\"*"))


def _polar_statement(row: ReferenceRow) -> str | None:
    """Return yes or no for a reference that affirms or denies a yes-or-no question and adds nothing."""
    if not ASKS_POLAR.match(row.question):
        return None
    words = {fold(word) for word in _WORD.findall(row.reference)}
    return "no" if _NEGATIONS & words or "n't" in row.reference else "yes"
