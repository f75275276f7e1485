"""Judge how an answer behaves, whatever it says: silence, loops, echoes, other languages, control tokens, no end."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tunewell.evaluation.language import language_of, script_of
from tunewell.evaluation.loops import is_loop
from tunewell.evaluation.matching import words_of
from tunewell.records.report import Fault

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
class Answer:
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


def faults_of(answer: Answer) -> list[Fault]:
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


def _is_past_the_reference(answer: Answer) -> bool:
    # A limit that cuts off the reference too says nothing about whether the model would have ended.
    return len(answer.text) > len(answer.reference) or not answer.text.strip()


def _has_control_tokens(answer: Answer) -> bool:
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


def _echoes(answer: Answer) -> bool:
    lines = [line for line in answer.question.splitlines() if line.strip()]
    asked = [words_of(answer.question), *([words_of(lines[-1])] if len(lines) > 1 else [])]
    return any(_begins_with(answer.text, words) and not _begins_with(answer.reference, words) for words in asked)


def _begins_with(text: str, question: list[str]) -> bool:
    needed = min(len(question), _MOST_ECHO)
    # Six characters of Chinese are three words.
    is_telling = len("".join(question[:needed])) >= 3 * _MIN_ECHO or needed == _MOST_ECHO
    if needed < _MIN_ECHO or not is_telling:
        return False
    said = words_of(text[:2000])
    return any(said[skipped : skipped + needed] == question[:needed] for skipped in range(_LABEL_WORDS + 1))


def _is_in_another_language(answer: Answer) -> bool:
    wanted = answer.reference
    if language_of(wanted) is None and script_of(wanted) in ("LATIN", None):
        wanted = answer.question
        if _TRANSLATES.search(wanted):
            return False
    said = script_of(answer.text)
    # A name or a formula may stand in the letters of the reference whatever was asked.
    scripts = said, script_of(answer.reference) if said == script_of(answer.reference) else script_of(wanted)
    languages = language_of(answer.text), language_of(wanted)
    # Letters of another alphabet tell although neither language is certain: Cyrillic in place of Latin.
    return any(own is not None and due is not None and own != due for own, due in (scripts, languages))
