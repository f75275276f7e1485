"""Detect faulty answers: empty, looping, echoing, wrong language, control tokens, or no stop."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tunewell.core.text import detect_language, detect_script
from tunewell.inference.degeneration import BLANK, is_echo, is_loop
from tunewell.records.report import Fault

_MARKER = re.compile(
    # A marker in quotes is part of the text, not a control token.
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
class JudgedAnswer:
    """One answer of a model, with its question and reference."""

    text: str
    ids: Sequence[int]
    """Token ids without the stop token."""
    ended: bool
    """Whether the model stopped before the length limit."""
    question: str = ""
    """The user's text, without the chat template."""
    reference: str = ""
    control_texts: Sequence[str] = ()
    """Text of each control token in `ids`; empty for a token without text."""


def find_faults(answer: JudgedAnswer) -> list[Fault]:
    """Return the faults of an answer, the worst first; correctness is not checked."""
    text = answer.text.strip(BLANK)
    if not answer.ids and not text:
        # A prompt that fills the context produces neither tokens nor a stop, which is not a fault of the model.
        return ["ends_at_once"] if answer.ended else []
    loops = is_loop(answer.text, ids=answer.ids, ended=answer.ended, reference=answer.reference)
    found: dict[Fault, bool] = {
        "empty": not text,
        "loops": loops and bool(text),
        "control_tokens": _has_control_tokens(answer),
        # A limit shorter than the reference does not show whether the model would have stopped.
        "no_stop": not answer.ended and not loops and (len(answer.text) > len(answer.reference) or not text),
        "echo": is_echo(answer.text, question=answer.question, reference=answer.reference),
        "other_language": _is_in_another_language(answer),
    }
    return [fault for fault, is_present in found.items() if is_present]


def _has_control_tokens(answer: JudgedAnswer) -> bool:
    if any(not token or token not in answer.reference for token in answer.control_texts):
        return True
    known = answer.reference + answer.question
    if any(found[0] not in known for found in _MARKER.finditer(answer.text)):
        return True
    if _HEADING.search(answer.text) and not _HEADING.search(answer.reference):
        return True
    return _goes_on_as_the_user(answer.text) and not _USER.search(answer.reference)


def _goes_on_as_the_user(text: str) -> bool:
    """Return True if an answer continues with a dialogue but does not begin as one.

    It costs $5.          <- the answer
    User: And in winter?  <- the model continues as the user
    Assistant: ...
    """
    text = text.lstrip()
    user = _USER.search(text)
    if user is None or user.start() == 0:
        return False
    num_turns = len(_USER.findall(text)) + len(_ASSISTANT.findall(text))
    # "Human:" is always a turn of a dialogue; a form or a log may have one line that begins with "User:".
    return "Human" in user[0] or (num_turns >= 2 and not _ASSISTANT.match(text))


def _is_in_another_language(answer: JudgedAnswer) -> bool:
    expected = answer.reference
    if detect_language(expected) is None and detect_script(expected) in ("LATIN", None):
        expected = answer.question
        if _TRANSLATES.search(expected):
            return False
    script, reference_script = detect_script(answer.text), detect_script(answer.reference)
    # A name or a formula may use the script of the reference, whatever the question's script is.
    expected_script = reference_script if script == reference_script else detect_script(expected)
    # A different script is a fault even if neither language is certain, e.g. Cyrillic instead of Latin.
    pairs = ((script, expected_script), (detect_language(answer.text), detect_language(expected)))
    return any(found is not None and due is not None and found != due for found, due in pairs)
