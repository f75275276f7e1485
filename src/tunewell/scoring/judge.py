"""Judge answers: right, wrong or a refusal, by the answer key of the question.

key          answer                                    result
15 January   It is January 15th.                       right
15 January   It is not 15 January.                     wrong: denied
15 January   Either 15 January or 3 March.             wrong: several values
31,400       Tuition is $31400 a year.                 right
15 January   The documents do not say.                 refusal
"""

import re
from collections.abc import Iterator
from functools import cache, lru_cache

from tunewell.core.text import SPACELESS_LETTER, fold, function_words
from tunewell.scoring.answer_keys import ASKS_POLAR, AnswerKey, content_words, polarity, split_tokens, words_of
from tunewell.scoring.answer_values import find_values
from tunewell.scoring.base import Score
from tunewell.scoring.choice import NAMED
from tunewell.scoring.matching import is_refusal, match, stands_alone
from tunewell.scoring.number import marked_results, result
from tunewell.scoring.words import read_lines, word_set

Span = tuple[int, int]

_CLAUSE_END = re.compile(r"[.;:!?\n。；！？](?!\d)|,|，|\b(?:but|however|although|sondern|mais|pero|sino|ma|mas)\b")
_DENIED_BEFORE = re.compile(
    r"\b(?:not|never|isn't|wasn't|aren't|weren't|doesn't|don't|didn't|cannot|can't|won't|no longer|nor|neither|"
    r"no (?:es|era|fue|lo|la|se|está)|instead of|rather than|other than|except|far from|hardly|scarcely|barely|"
    r"used to be|formerly|myth that|untrue that|false that|wrong that|nobody|no one|"
    r"(?<!no )(?<!without )(?<!a )doubts?|doubtful|ليس|ليست|لم|"
    r"nicht|kein\w*|statt|pas|jamais|plutôt que|nunca|non|não|niet|geen|не)\s"
    # "not later than 15 January" and "cannot apply after 15 January" affirm the date.
    r"(?!.*\b(?:later|after|past|beyond|until|till|before|only|just|exceed|nach|vor|après|avant|después|antes|dopo|"
    r"prima)\b)"
    r"(?:\S+\s+){0,5}\S*$|[不没沒非未無无]是?$"
)
_NOT_STATED = re.compile(
    r"\b(?:no|without|lacks?|(?:moved|changed|switched) from|succeeded|replace[sd]?|than"
    r"|no (?!doubt|question)\w+ (?:in|for|of|on))\s+(?:(?:any|the|a)\s+)?$"
)
"""Words directly before a name that say that it is not the answer: `without flour`, `larger than Jupiter`."""
_DENIED_AFTER = re.compile(
    r"^\W*(?:(?!and\b|which\b|that\b|who\b)\S+\s+){0,2}"
    r"(?:(?:is|was|are|were|did|does|do|has|had|will|would|could)(?:n't| not)\b"
    r"|(?:is|was) (?:wrong|false|incorrect|replaced|succeeded)\b|ist (?:falsch|nicht)|n'est pas)|^-free\b"
)
_PAST = re.compile(r"\b(?:was|were|had been)\b")
_SINCE_THEN = re.compile(
    r"\b(?:now|today|nowadays|currently|meanwhile|changed|moved|postponed|extended|replaced|renamed|repainted|became)\b"
)
_TOO_LATE = re.compile(r"^\W*(?:it is |it's |only |any time )?(?:after|later than|past)\s+(?:the\s+)?$")
_LISTED = re.compile(
    r"^[\s\"'*)]*(?:[,/&;]|,?\s*\b(?:or|and|oder|und|ou|et|o|u|y|e|или|и)\b)+[\s\"'*(]*"
    r"(?:(?:maybe|perhaps|possibly|else|the|it is|on|by|at|in|is|also)\s+){0,2}$|^\s*(?:或者?|还是|または|か)\s*$"
)
_OR_BEFORE = re.compile(r"\b(?:or|oder|ou)\s+(?:the |a |an |in |on |by |possibly |maybe |perhaps )?$")
_OR_AFTER = re.compile(r"^[\s\"'*,]*(?:or|oder|ou)\s+(?!later\b|earlier\b|before\b|more\b|less\b|so\b)\w")
_FIRST_CLAUSE = re.compile(r"[.,;:!?()\[\]\n。，、！？；：-]+")
_VERSION = re.compile(r"\b(?:version|release|v)\s?\d|\bversion\b", re.IGNORECASE)


def judge(answer: str, key: AnswerKey) -> Score:
    """Judge an answer by the key of its question."""
    # "but" begins a clause, except here.
    text = re.sub(r"\b(?:any\w*|every\w*|all) but\b", "never", fold(answer)).strip()
    refuses = is_refusal(text, is_answer=True)
    if key.is_refusal:
        return Score(refuses, "a refusal is expected", is_refusal=refuses)
    if not key.accepted:
        return Score(None, "the question has no key", is_refusal=refuses)
    found, because = _is_right(text, key)
    # "I am not sure, but I think 3 March" states a value.
    if refuses and not found and not _other_values(text, key):
        return Score(False, "refuses", is_refusal=True)
    return Score(found, because)


def contains_key(text: str, key: AnswerKey) -> bool:
    """Return True if a text, such as a passage, contains the key. Unlike an answer, it may list other values too."""
    folded = fold(text)
    return any(all(any(_find(folded, part, key)) for part in parts) for parts in key.accepted)


def _is_right(text: str, key: AnswerKey) -> tuple[bool, str]:
    if contrary := _contradicts(text, key):
        return False, contrary
    if key.is_polar:
        said = _said_polarity(text, key)
        return said is not None and said in map(polarity, key.first_parts), f"says {said or 'neither'}"
    if key.is_final:
        return _is_final_right(text, key)
    if key.reference and match(text, key.reference).exact:
        return True, "equals the reference"
    reasons: list[str] = []
    for parts in key.accepted:
        problems = [problem for part in parts if (problem := _problem(text, part, key)) is not None]
        if not problems:
            return True, f"contains {' and '.join(parts)}"
        reasons += problems
    return False, reasons[0]


def _problem(text: str, part: str, key: AnswerKey) -> str | None:
    """Return why an answer does not state a part of the key, or None if it does."""
    if len(part) == 1 and part.isascii() and part.isalpha():
        return None if match(text, part).contains else f"{part} is missing"
    places = list(_find(text, part, key))
    if not places:
        sides = {group: side for group, side in _sides(fold(part)).items() if side}
        # "prohibited" for "not allowed"
        return None if sides and sides.items() <= _sides(text).items() else f"{part} is missing"
    stated = [place for place in places if not _is_denied(text, place) and not _is_asked(text, place)]
    stated = [place for place in stated if not _is_outdated(text, place, key)]
    if not stated:
        return f"{part} is denied"
    if all(_is_one_of_several(text, place, key) for place in stated):
        return f"{part} is one of several"
    reference = fold(key.reference)
    bounds = [_bound(reference, place) for place in _find(reference, part, key)]
    if any(_bound(text, place) * bound < 0 for place in stated for bound in bounds):
        return f"{part} is the other bound"
    rival = _stated_rival(text, stated, key)
    return f"{rival} is stated too" if rival else None


def _is_asked(text: str, place: Span) -> bool:
    """Return True if the sentence of a place is a question."""
    end = re.search(r"[.!?\n](?!\d)", text[place[1] :])
    return end is not None and end[0] == "?"


def _is_outdated(text: str, place: Span, key: AnswerKey) -> bool:
    """Return True if an answer states a value of the past (`was red, but now it is blue`), or one after the key."""
    before, _ = _clause_around(text, place)
    reference = f"{fold(key.question)} {fold(key.reference)}"
    if _TOO_LATE.search(before) and not re.search(r"\b(?:after|later|past)\b", reference):
        return True
    is_past = _PAST.search(before) and not _PAST.search(reference)
    return bool(is_past and _SINCE_THEN.search(text[place[1] :]))


_AT_LEAST = re.compile(
    r"\b(?:at least|not? (?:less|fewer) than|(?<!no )(?<!not )more than|over|above|from|minimum(?: of)?|mindestens"
    r"|au moins|al menos|>=?)\s+(?:\S+\s+)?$"
)
_AT_MOST = re.compile(
    r"\b(?:at most|no more than|not more than|less than|fewer than|under|below|up to|maximum(?: of)?|höchstens|au plus|"
    r"como máximo|<=?)\s+(?:\S+\s+)?$"
)


def _bound(text: str, place: Span) -> int:
    """Return 1 if a value is a lower bound (`at least 3`), -1 if it is an upper bound, and 0 if it is neither."""
    before, after = _clause_around(text, place)
    if re.match(r"\W*or (?:less|fewer|under)\b", after):
        return -1
    if _AT_LEAST.search(before) or re.match(r"\W*or more\b", after):
        return 1
    return -1 if _AT_MOST.search(before) else 0


def _stated_rival(text: str, stated: list[Span], key: AnswerKey) -> str | None:
    """Return a rival, or another value, that an answer states in the same way as the key: `It is red. It is blue.`"""
    known = words_of(key.question).union(*(_rest_of_clause(text, place) for place in stated))
    known |= {word for one in (*key.rivals, key.text, key.reference) for word in fold(one).split()}
    rivals = [one for one in key.rivals if fold(one) in text and not any(_find(fold(key.reference), one, key))]
    found = [(rival, span) for rival in rivals for span in _find(text, rival, key)]
    # "From 1 October to 15 January" is one statement, so another value must be in another clause.
    others = [
        span for span in _other_values(text, key) if all(_CLAUSE_END.search(_gap(text, span, one)) for one in stated)
    ]
    for rival, span in [*found, *((text[slice(*span)], span) for span in others)]:
        is_stated = not _is_denied(text, span) and not _is_asked(text, span)
        if is_stated and all(_are_apart(span, one) for one in stated) and _rest_of_clause(text, span) <= known:
            return rival
    return None


def _rest_of_clause(text: str, place: Span) -> set[str]:
    """Return the content words of the clause around a place."""
    return words_of(" ".join(_clause_around(text, place))) - function_words()["en"] - word_set("plain")


@cache
def _opposites() -> dict[str, tuple[int, int]]:
    """Return the group and the side (1 or -1) of each word of `opposites.txt`."""
    found: dict[str, tuple[int, int]] = {}
    for number, line in enumerate(read_lines("opposites.txt")):
        for side, words in zip((1, -1), line.split("|"), strict=True):
            found |= dict.fromkeys(words.split(), (number, side))
    return found


def _sides(text: str) -> dict[int, int]:
    """Return the side that a text takes in each pair of opposites, with `not` and the like; 0 if it takes both."""
    found: dict[int, int] = {}
    for word in re.finditer(r"[^\W\d_]+", text):
        if word[0] in _opposites():
            group, side = _opposites()[word[0]]
            negated = re.search(
                r"\b(?:not|never|no|isn't|aren't|wasn't|weren't|cannot)\s+(?:\w+\s)?$", text[: word.start()]
            )
            side = -side if negated else side
            found[group] = side if found.get(group, side) == side else 0
    return found


def _contradicts(text: str, key: AnswerKey) -> str | None:
    """Return why an answer contradicts the reference although it has its words: an opposite, or names exchanged."""
    if not key.reference:
        return None
    reference = fold(key.reference)
    asked, expected, said = _sides(fold(key.question)), _sides(reference), _sides(text)
    for group, side in expected.items():
        # "Before or after?": both sides in the question are no contradiction.
        if side and said.get(group) == -side and (group not in asked or asked[group]):
            return "says the opposite"
    words, own = ([token.word for token in split_tokens(one)] for one in (text, reference))
    # "Berlin is the capital" is the capital: only names around a verb cannot be exchanged.
    has_one_part = key.origin == "derived" and all(len(parts) == 1 for parts in key.accepted)
    is_list = has_one_part or re.search(r"\b(?:and|or|und|et|y)\b|,", reference) or len(own) <= 2
    return "has the words in another order" if not is_list and words != own and sorted(words) == sorted(own) else None


def _find(text: str, part: str, key: AnswerKey) -> Iterator[Span]:
    """Yield the places of a part in an answer, as the same words or as the same date or number."""
    for value in find_values(part)[:1]:
        is_whole = not re.search(r"\w", part[: value.start] + part[value.end :])
        # Versions are texts: 1.1 is not 1.10.
        is_version = value.kind == "number" and _VERSION.search(f"{key.question} {key.reference}")
        if is_whole and not is_version:
            known = _known_words(key.question)
            yield from ((other.start, other.end) for other in find_values(text) if value.equals(other, known))
            if value.unit or (value.kind == "date" and any(year for _, _, year in value.readings)):
                return
    yield from (found.span() for found in _pattern(part).finditer(text) if stands_alone(text, *found.span()))


@lru_cache(maxsize=4096)
def _pattern(part: str) -> re.Pattern[str]:
    """Return a pattern for the words of a key: any spaces, punctuation and articles may separate them."""
    words = [word for raw in fold(part).split() if (word := raw.strip(".,;:!?\"'()[]*`“”"))] or [fold(part)]
    escaped = [
        "".join(re.escape(letter) + (r"\s*" if SPACELESS_LETTER.match(letter) else "") for letter in word)
        for word in words
    ]
    return re.compile(r"(?:[^\w]+(?:(?:the|a|an)[^\w]+)?)".join(escaped).removesuffix(r"\s*"))


@lru_cache(maxsize=4096)
def _known_words(question: str) -> frozenset[str]:
    """Return the words that may follow a number without its unit: function words, and words of the question."""
    return function_words()["en"] | word_set("after number") | words_of(question)


def _clause_around(text: str, place: Span) -> tuple[str, str]:
    """Return the text of the same clause before and after a place."""
    before, after = text[: place[0]], text[place[1] :]
    start = max((found.end() for found in _CLAUSE_END.finditer(before)), default=0)
    return before[start:], _CLAUSE_END.split(after, maxsplit=1)[0]


def _is_denied(text: str, place: Span) -> bool:
    before, after = _clause_around(text, place)
    is_value = bool(find_values(text[slice(*place)]))
    is_left_out = not is_value and _NOT_STATED.search(before)
    return bool(is_left_out or _DENIED_BEFORE.search(before) or _DENIED_AFTER.search(after))


def _is_one_of_several(text: str, place: Span, key: AnswerKey) -> bool:
    """Return True if an answer lists the key with other values, so that it does not choose."""
    before, after = text[: place[0]][-40:], text[place[1] :][:40]
    if " or " not in f" {fold(key.reference)} " and (_OR_BEFORE.search(before) or _OR_AFTER.search(after)):
        return True
    rivals = [span for rival in key.rivals if fold(rival) in text for span in _find(text, rival, key)]
    values = [_gap(text, span, place) for span in _other_values(text, key)]
    gaps = [*values, *(_gap(text, span, place) for span in rivals if _are_apart(span, place))]
    # "1 March 2 March 3 March", but not the parts of a phone number.
    is_list = len(values) > 1 and any(not re.search(r"\w", gap) for gap in values)
    return is_list or any(len(gap) <= 40 and _LISTED.search(gap) for gap in gaps)


def _gap(text: str, one: Span, other: Span) -> str:
    """Return the text between two places."""
    return text[one[1] : other[0]] if one[1] <= other[0] else text[other[1] : one[0]]


def _are_apart(one: Span, other: Span) -> bool:
    return one[1] <= other[0] or one[0] >= other[1]


def _other_values(text: str, key: AnswerKey) -> list[Span]:
    """Return the places of values of the key's kind that neither the key nor the question or the reference contains."""
    expected = [value for parts in key.accepted for part in parts for value in find_values(part)]
    known = [*expected, *find_values(key.question), *find_values(key.reference)]
    return [
        (value.start, value.end)
        for value in find_values(text)
        if any(one.kind == value.kind and value.unit in ("", one.unit) for one in expected)
        and (not value.next_word or value.next_word in _known_words(""))
        and not any(one.readings & value.readings or one.equals(value) for one in known)
    ]


def _said_polarity(text: str, key: AnswerKey) -> str | None:
    """Return whether an answer says yes, no or maybe: in its first clause, or as `the answer is yes`."""
    clauses = [part.strip() for part in _FIRST_CLAUSE.split(text.replace("*", "")) if part.strip()]
    # "Yes, it does." and "It does, yes."
    said = {found for word in (_ends(clauses[0]) if clauses else []) if (found := polarity(word))}
    said = said or {found for clause in clauses if (found := polarity(clause))}
    named = NAMED.search(text)
    if named and (word := re.search(r"[^\W\d_]+", named["rest"])) and (found := polarity(word[0])):
        said = {found}
    if len(said) == 1:
        return said.pop()
    is_asked = key.origin == "derived" or ASKS_POLAR.match(key.question)
    return _implied_polarity(text, key) if is_asked and not said else None


def _ends(clause: str) -> list[str]:
    if re.search(r"\b(?:yes (?:and|or) no|ja (?:und|oder) nein)\b", clause):
        return ["yes", "no"]
    words = clause.split()
    return [*words[:1], *words[-1:]]


def _implied_polarity(text: str, key: AnswerKey) -> str | None:
    """Return what a statement without yes or no implies, if it repeats at least half of the question's content."""
    sentence = re.split(r"[.!?\n]", text.strip())[0]
    asked = content_words(key.question)
    if not asked or len(asked & content_words(sentence)) < len(asked) / 2:
        return None
    denies = re.search(r"\b(?:no|not|never|none|without|neither|cannot)\b|n't\b", sentence)
    return "no" if denies else "yes"


def _is_final_right(text: str, key: AnswerKey) -> tuple[bool, str]:
    """Compare only the result of an answer: after `####`, in a box, after `answer`, or its last number."""
    (found, _), lines = result(text), [*marked_results(text), *text.splitlines()[-1:]]
    for part in key.first_parts:
        expected, _ = result(part)
        # Units are not compared: `#### 10` stands for dollars as well as for minutes.
        is_same = found and found.readings & expected.readings if expected else lines and match(lines[0], part).contains
        if is_same:
            return True, f"the result is {part}"
    return False, f"the result is not {key.text}"
