"""Detect degenerate answers: empty, looping, or an echo of the question. They need no judge and no second model."""

import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from tunewell.core.text import split_words
from tunewell.records.report import Fault

BLANK = " \t\r\n\u200b\ufeff"
"""Characters that an empty answer may have."""


def find_degeneration(text: str, *, ids: Sequence[int], ended: bool, question: str, reference: str) -> Fault | None:
    """Return the first fault of an answer that is empty, loops or repeats the question, otherwise None.

    `ids` are the token ids without the stop token; `ended` is whether the model stopped before the length limit.
    """
    if not text.strip(BLANK):
        # A prompt that fills the context produces neither tokens nor a stop, which is not a fault of the model.
        return "empty" if ids else "ends_at_once" if ended else None
    if is_loop(text, ids=ids, ended=ended, reference=reference):
        return "loops"
    return "echo" if is_echo(text, question=question, reference=reference) else None


# Echoes.

_MIN_ECHO = 6
"""Minimum length, in words, of a question that counts as echoed; "What is the capital of" has five."""
_MAX_ECHO = 30
"""Number of repeated words that count as an echo of a long question. A shorter question must be repeated in full: "Two
white socks cost 25 cents more" may begin both the question and its solution."""
_LABEL_WORDS = 2
"""Maximum number of words before an echo, such as "Question:"."""


def is_echo(text: str, *, question: str, reference: str) -> bool:
    """Return True if an answer begins with the question or its last line, and its reference does not."""
    lines = [line for line in question.splitlines() if line.strip()]
    asked = [split_words(question), *([split_words(lines[-1])] if len(lines) > 1 else [])]
    return any(_begins_with(text, words) and not _begins_with(reference, words) for words in asked)


def _begins_with(text: str, question: list[str]) -> bool:
    needed = min(len(question), _MAX_ECHO)
    # Six Chinese characters are about three words.
    is_long_enough = len("".join(question[:needed])) >= 3 * _MIN_ECHO or needed == _MAX_ECHO
    if needed < _MIN_ECHO or not is_long_enough:
        return False
    words = split_words(text[:2000])
    return any(words[skipped : skipped + needed] == question[:needed] for skipped in range(_LABEL_WORDS + 1))


# Loops: answers that repeat one unit many times.

_TIMES = 4
"""Number of repetitions that count as a loop; three may be emphasis."""
_PHRASE = 3
"""Minimum length of a phrase in words; a phrase repeated four times is a loop even in an answer that stopped."""
_TIMES_SHORT = 8
"""Repetitions of one or two words that count as a loop in an answer that stopped, e.g. "blue" eight times."""
_TIMES_ANY = 20
"""Repetitions of a syllable, such as laughter, that count as a loop."""
_SYLLABLE = 3
"""Maximum number of letters of a syllable, which may be laughter or part of a song: ha, la, na."""
_MIN_TAIL = 8
"""Repeated words that count as a loop at the end of an answer that was cut off; fewer may be a coincidence."""
_MIN_TAIL_IDS = 20
"""Repeated tokens that count as a loop at the end of such an answer; the line below a table header has fewer."""
_MIN_CHARACTERS = 40
"""Minimum length of a run of repeated characters that counts as a loop; horizontal rules and numbers are ignored."""
_MIN_WORDS = 40
"""Minimum number of words for measuring the share of distinct 4-grams."""
_MIN_NEW = 0.25
"""Minimum share of distinct 4-grams in an answer that was cut off; prose is near 1, lists of similar sentences are
above 0.5."""
_COUNTER = re.compile(r"^\s*(?:\(?\d{1,4}[.):]|[-*•])\s+", re.MULTILINE)
_CHARACTERS = re.compile(r"([^\d\s]{1,4}?)\1+|(\s)\2+")


_DIGITS = re.compile(r"\d+")
_REPEATED_WORDS, _REPEATED_LETTERS = (2, 0.5), (3, 0.6)
"""Minimum number and share of repeated items: "fine fine fine", "aaaa". "bye bye" and "banana" have fewer."""


def is_repetitive(text: str, *, reference: str) -> bool:
    """Return True if half of an answer repeats what is a fixed distance before it, and its reference does not.

    A single answer like "no no no" may be right, so this is only a sign of a loop if many answers are repetitive. The
    unit may change, as in "fine fine fine good good good" and in "item 1 item 2 item 3".
    """
    words, expected = ([_DIGITS.sub("0", word) for word in split_words(part)] for part in (text, reference))
    has_own_words = set(words) <= {word for word, times in Counter(expected).items() if times > 1}
    return _is_periodic(words) and not has_own_words and not _is_periodic(expected)


def _is_periodic(words: list[str]) -> bool:
    # Numbers and the lines of a table are no loops.
    if 2 * sum(any(map(str.isalpha, word)) for word in words) < len(words):
        return False
    return any(
        _num_repeated(items) >= max(least, share * len(items))
        for items, (least, share) in ((words, _REPEATED_WORDS), ("".join(words), _REPEATED_LETTERS))
    )


def _num_repeated(items: Sequence[str]) -> int:
    """Return the largest number of items that equal the item one period before them, over all periods."""
    codes = np.unique([*items], return_inverse=True)[1]
    return max((int((codes[:-period] == codes[period:]).sum()) for period in range(1, len(codes))), default=0)


@dataclass(frozen=True)
class Repetition:
    """A unit repeated several times in a row."""

    begin: int
    end: int
    period: int

    @property
    def times(self) -> int:
        """Number of complete repetitions."""
        return (self.end - self.begin) // self.period


def is_loop(text: str, *, ids: Sequence[int], ended: bool, reference: str) -> bool:
    """Return True if an answer loops and its reference does not."""
    words = split_words(_COUNTER.sub("", text))
    longest = _longest_repetition(words, least=3)
    # The search is quadratic, so only the beginning of a much longer reference is used.
    known = split_words(_COUNTER.sub("", reference))[: max(200, 2 * len(words))]
    expected = _longest_repetition(known, least=3)
    if expected and longest and expected.times >= 3 and 2 * expected.times >= longest.times:
        return False
    if ended:
        return _is_mostly(words, longest) or _is_one_character(text, reference)
    tails = (words, min(_MIN_TAIL, max(_TIMES, len(words) // 2))), (ids, min(_MIN_TAIL_IDS, len(ids) // 2))
    return (
        any(
            (tail := _longest_repetition(items, least=_TIMES, is_final=True)) and tail.end - tail.begin >= fewest
            for items, fewest in tails
        )
        or _is_one_character(text, reference)
        or _has_few_new_words(words)
    )


def _is_mostly(words: list[str], run: Repetition | None) -> bool:
    """Return True if most of a completed answer is one repeated unit, unless people also repeat such units."""
    if run is None or 2 * (run.end - run.begin) <= len(words):
        return False
    unit = words[run.begin : run.begin + run.period]
    # Zeros in a matrix or ticks in a table are not a loop.
    if not any(letter.isalpha() for word in unit for letter in word):
        return False
    # A unit of two words may be the same word twice, so only distinct words are counted.
    is_syllable = sum(map(len, set(unit))) <= _SYLLABLE
    if len(unit) >= _PHRASE and len(set(unit)) > 1:
        return run.times >= _TIMES
    return run.times >= (_TIMES_ANY if is_syllable else _TIMES_SHORT)


def _is_one_character(text: str, reference: str) -> bool:
    longest = max(_CHARACTERS.finditer(text.strip()), key=lambda found: len(found[0]), default=None)
    if longest is None or len(longest[0]) < _MIN_CHARACTERS or 2 * len(longest[0]) <= len(text.strip()):
        return False
    return longest[0][: _MIN_CHARACTERS // 2] not in reference


def _has_few_new_words(words: list[str]) -> bool:
    if len(words) < _MIN_WORDS:
        return False
    fours = list(zip(words, words[1:], words[2:], words[3:], strict=False))
    return len(set(fours)) < _MIN_NEW * len(fours)


def _longest_repetition(items: Sequence[Hashable], *, least: int, is_final: bool = False) -> Repetition | None:
    """Return the longest repetition of at least `least` units. Its last unit may be cut off.

    With `is_final`, only repetitions at the end of the items count.
    """
    best: Repetition | None = None
    known: dict[Hashable, int] = {}
    codes = np.array([known.setdefault(item, len(known)) for item in items])
    for period in range(1, len(items) // least + 1):
        # Between two places that differ from the next unit, the items repeat themselves.
        [places] = np.nonzero(codes[:-period] != codes[period:])
        differs = np.concatenate([[-1], places, [len(items) - period]])
        at = len(places) if is_final else int(np.argmax(np.diff(differs)))
        run = Repetition(int(differs[at]) + 1, int(differs[at + 1]) + period, period)
        if run.times >= least and (best is None or run.end - run.begin > best.end - best.begin):
            best = run
    return best
