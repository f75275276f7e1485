"""Find the stretch of an answer that says the same thing over and over."""

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tunewell.evaluation.matching import words_of

_TIMES = 4
"""Times from which on saying a thing again is a loop: three is emphasis."""
_PHRASE = 3
"""Words from which on a unit is a phrase: nobody says one four times in a row and then ends."""
_TIMES_SHORT = 8
"""Times for a word or two in an answer that ended: "blue" eight times is a loop."""
_TIMES_ANY = 20
"""Times after which even laughter is a loop."""
_SYLLABLE = 3
"""Letters up to which a unit may be laughter or a song's: ha, la, na."""
_MIN_TAIL = 8
"""Words at the end of an answer that never ended: fewer may be a coincidence, cut off."""
_MIN_TAIL_IDS = 20
"""Tokens, likewise: dashes under the head of a table are fewer."""
_MIN_SIGNS = 40
"""Letters or signs in a row that no answer needs; rules across a page and numbers are left alone."""
_MIN_WORDS = 40
"""Words from which on the share of new ones can be told."""
_MIN_NEW = 0.25
"""Share of runs of four words that must be new in an answer that never ended; in prose nearly all are, and in lists of
like sentences most."""
_COUNTER = re.compile(r"^\s*(?:\(?\d{1,4}[.):]|[-*•])\s+", re.MULTILINE)
_SIGNS = re.compile(r"([^\d\s]{1,4}?)\1+|(\s)\2+")


@dataclass(frozen=True)
class Run:
    """A unit said several times in a row."""

    begin: int
    end: int
    period: int

    @property
    def times(self) -> int:
        """How often the unit stands there in full."""
        return (self.end - self.begin) // self.period


def is_loop(text: str, *, ids: Sequence[int], ended: bool, reference: str) -> bool:
    """Say whether an answer goes round in circles, in a way its reference does not."""
    said = words_of(_COUNTER.sub("", text))
    longest = _longest_run(said)
    # A reference far longer than the answer tells no more than its beginning, and takes the square of its length.
    wanted = _longest_run(words_of(_COUNTER.sub("", reference))[: max(200, 2 * len(said))])
    if wanted and longest and wanted.times >= 3 and 2 * wanted.times >= longest.times:
        return False
    if ended:
        return _goes_round(said, longest) or _is_one_sign(text, reference)
    tail = _tail_run(said)
    tail_of_ids = _tail_run(ids)
    return (
        (tail is not None and tail.end - tail.begin >= min(_MIN_TAIL, max(_TIMES, len(said) // 2)))
        or (tail_of_ids is not None and tail_of_ids.end - tail_of_ids.begin >= min(_MIN_TAIL_IDS, len(ids) // 2))
        or _is_one_sign(text, reference)
        or _says_nothing_new(said)
    )


def _goes_round(words: list[str], run: Run | None) -> bool:
    """Judge an answer that ended: most of it is one unit, and the unit is none that people repeat."""
    if run is None or 2 * (run.end - run.begin) <= len(words):
        return False
    unit = words[run.begin : run.begin + run.period]
    # Zeros in a matrix, ticks in a table.
    if not any(letter.isalpha() for word in unit for letter in word):
        return False
    # A unit of two may itself be a word twice; its letters are counted as they are.
    is_syllable = sum(map(len, set(unit))) <= _SYLLABLE
    if len(unit) >= _PHRASE and len(set(unit)) > 1:
        return run.times >= _TIMES
    return run.times >= (_TIMES_ANY if is_syllable else _TIMES_SHORT)


def _is_one_sign(text: str, reference: str) -> bool:
    longest = max(_SIGNS.finditer(text.strip()), key=lambda found: len(found[0]), default=None)
    if longest is None or len(longest[0]) < _MIN_SIGNS or 2 * len(longest[0]) <= len(text.strip()):
        return False
    return longest[0][: _MIN_SIGNS // 2] not in reference


def _says_nothing_new(words: list[str]) -> bool:
    if len(words) < _MIN_WORDS:
        return False
    fours = list(zip(words, words[1:], words[2:], words[3:], strict=False))
    return len(set(fours)) < _MIN_NEW * len(fours)


def _tail_run(items: Sequence[Hashable]) -> Run | None:
    """Find the run at the very end that covers most; its last unit may be cut off."""
    best: Run | None = None
    for period in range(1, len(items) // _TIMES + 1):
        begin = len(items) - period
        while begin > 0 and items[begin - 1] == items[begin - 1 + period]:
            begin -= 1
        run = Run(begin, len(items), period)
        if run.times >= _TIMES and (best is None or run.begin < best.begin):
            best = run
    return best


def _longest_run(items: Sequence[Hashable]) -> Run | None:
    """Find the run of at least three units that covers most, anywhere."""
    best: Run | None = None
    for period in range(1, len(items) // 3 + 1):
        differs = [-1, *(at for at in range(len(items) - period) if items[at] != items[at + period])]
        differs.append(len(items) - period)
        before, after = max(pairwise(differs), key=lambda pair: pair[1] - pair[0])
        run = Run(before + 1, after + period, period)
        if run.times >= 3 and (best is None or run.end - run.begin > best.end - best.begin):
            best = run
    return best
