"""Judge how an answer behaves, whatever it says: silence, loops, echoes, other languages, control tokens, no end."""

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tunewell.evaluation.language import detect_language, detect_script
from tunewell.evaluation.matching import split_words
from tunewell.records.report import Fault

# Find the stretch of an answer that says the same thing over and over.

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
class Repetition:
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
    said = split_words(_COUNTER.sub("", text))
    longest = _longest_run(said)
    # A reference far longer than the answer tells no more than its beginning, and takes the square of its length.
    wanted = _longest_run(split_words(_COUNTER.sub("", reference))[: max(200, 2 * len(said))])
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


def _goes_round(words: list[str], run: Repetition | None) -> bool:
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


def _tail_run(items: Sequence[Hashable]) -> Repetition | None:
    """Find the run at the very end that covers most; its last unit may be cut off."""
    best: Repetition | None = None
    for period in range(1, len(items) // _TIMES + 1):
        begin = len(items) - period
        while begin > 0 and items[begin - 1] == items[begin - 1 + period]:
            begin -= 1
        run = Repetition(begin, len(items), period)
        if run.times >= _TIMES and (best is None or run.begin < best.begin):
            best = run
    return best


def _longest_run(items: Sequence[Hashable]) -> Repetition | None:
    """Find the run of at least three units that covers most, anywhere."""
    best: Repetition | None = None
    for period in range(1, len(items) // 3 + 1):
        differs = [-1, *(at for at in range(len(items) - period) if items[at] != items[at + period])]
        differs.append(len(items) - period)
        before, after = max(pairwise(differs), key=lambda pair: pair[1] - pair[0])
        run = Repetition(before + 1, after + period, period)
        if run.times >= 3 and (best is None or run.end - run.begin > best.end - best.begin):
            best = run
    return best


_MIN_ECHO = 6
"""Words of a question from which on saying them again is no accident: "What is the capital of" has five."""
_MOST_ECHO = 30
"""Words of a long question that are enough. Less than a whole question is none: "Two white socks cost 25 cents more"
may begin the question and its solution."""
_LABEL_WORDS = 2
"""Words an echo may begin with, such as "Question:"."""

_MARKER = re.compile(
    # In quotes a marker is spoken of.
    r"(?<![`\"'“‘«])(?:<\|[A-Za-z_][\w ]{0,40}\|>"
    r"|<｜[^｜\n]{1,40}｜>"
    r"|</?(?:start|end)_of_turn>"
    r"|\[/?(?:INST|SYSTEM_PROMPT|TOOL_CALLS|AVAILABLE_TOOLS|TOOL_RESULTS)\]"
    r"|<</?SYS>>"
    r"|</s>|<(?:eos|bos|pad|unk)>)"
)
_HEADING = re.compile(r"^[ \t]*#{2,4} ?(?:Instruction|Input|Response|Human|User|Assistant|System)\b ?:?", re.MULTILINE)
_USER = re.compile(r"^[ \t>*]*(?:Human|User|USER|Question|Q)\**:", re.MULTILINE)
_ASSISTANT = re.compile(r"^[ \t>*]*(?:Assistant|ASSISTANT|AI|Bot|Answer|A|Response)\**:", re.MULTILINE)
_TRANSLATES = re.compile(
    r"translat|übersetz|tradu[cizç]|vertaal|vertal|översätt|oversæt|oversett|перев[ео]|翻[译訳譯]|번역|ترجم"
    r"|\b(?:english|german|french|spanish|italian|portuguese|dutch|swedish|danish|norwegian|polish|czech|turkish|finnish"
    r"|romanian|indonesian|vietnamese|hungarian|russian|ukrainian|greek|arabic|hebrew|hindi|thai|chinese|mandarin|japanese"
    r"|korean|latin|language)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Sample:
    """What a model said to one question, and what it should have said."""

    text: str
    ids: Sequence[int]
    """Without the id that ended it."""
    ended: bool
    """Whether it ended by itself, before the limit."""
    question: str = ""
    """What was asked, without the template around it."""
    reference: str = ""
    control_texts: Sequence[str] = ()
    """The control tokens among the ids, as they are spelled; an empty text where they spell nothing."""


def find_faults(answer: Sample) -> list[Fault]:
    """List what is wrong with how an answer behaves, the gravest first; nothing is said about its truth.

    A prompt that leaves no room for an answer gives neither tokens nor an end, and that is no fault of the model.
    """
    said = answer.text.strip(" \t\r\n\u200b\ufeff")
    if not answer.ids and not said:
        return ["ends_at_once"] if answer.ended else []
    loops = is_loop(answer.text, ids=answer.ids, ended=answer.ended, reference=answer.reference)
    found: dict[Fault, bool] = {
        "empty": not said,
        "loops": loops and bool(said),
        "control_tokens": _has_control_tokens(answer),
        "no_stop": not answer.ended and not loops and _is_past_the_reference(answer),
        "echo": _echoes(answer),
        "other_language": _is_in_another_language(answer),
    }
    return [fault for fault, is_there in found.items() if is_there]


def _is_past_the_reference(answer: Sample) -> bool:
    # A limit that cuts off the reference too says nothing about whether the model would have ended.
    return len(answer.text) > len(answer.reference) or not answer.text.strip()


def _has_control_tokens(answer: Sample) -> bool:
    if any(not token or token not in answer.reference for token in answer.control_texts):
        return True
    known = answer.reference + answer.question
    if any(found[0] not in known for found in _MARKER.finditer(answer.text)):
        return True
    if _HEADING.search(answer.text) and not _HEADING.search(answer.reference):
        return True
    return _goes_on_as_the_user(answer.text) and not _USER.search(answer.reference)


def _goes_on_as_the_user(text: str) -> bool:
    """Say whether a dialogue follows an answer that did not begin as one.

    It costs $5.          <- the answer
    User: And in winter?  <- the model plays the user
    Assistant: ...
    """
    user = _USER.search(text.lstrip())
    if user is None or user.start() == 0:
        return False
    text = text.lstrip()
    begins_as_dialogue = bool(_ASSISTANT.match(text))
    others = len(_USER.findall(text)) + len(_ASSISTANT.findall(text))
    # "Human:" is no heading of anything else; a form or a log may have one line that begins with "User:".
    return "Human" in user[0] or (not begins_as_dialogue and others >= 2)


def _echoes(answer: Sample) -> bool:
    lines = [line for line in answer.question.splitlines() if line.strip()]
    asked = [split_words(answer.question), *([split_words(lines[-1])] if len(lines) > 1 else [])]
    return any(_begins_with(answer.text, words) and not _begins_with(answer.reference, words) for words in asked)


def _begins_with(text: str, question: list[str]) -> bool:
    needed = min(len(question), _MOST_ECHO)
    # Six characters of Chinese are three words.
    is_telling = len("".join(question[:needed])) >= 3 * _MIN_ECHO or needed == _MOST_ECHO
    if needed < _MIN_ECHO or not is_telling:
        return False
    said = split_words(text[:2000])
    return any(said[skipped : skipped + needed] == question[:needed] for skipped in range(_LABEL_WORDS + 1))


def _is_in_another_language(answer: Sample) -> bool:
    wanted = answer.reference
    if detect_language(wanted) is None and detect_script(wanted) in ("LATIN", None):
        wanted = answer.question
        if _TRANSLATES.search(wanted):
            return False
    said = detect_script(answer.text)
    # A name or a formula may stand in the letters of the reference whatever was asked.
    scripts = (
        said,
        detect_script(answer.reference) if said == detect_script(answer.reference) else detect_script(wanted),
    )
    languages = detect_language(answer.text), detect_language(wanted)
    # Letters of another alphabet tell although neither language is certain: Cyrillic in place of Latin.
    return any(own is not None and due is not None and own != due for own, due in (scripts, languages))
