"""Detect faulty answers: empty, looping, echoing, wrong language, control tokens, or no stop."""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

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
class Sample:
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


def find_faults(answer: Sample) -> list[Fault]:
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


def _is_in_another_language(answer: Sample) -> bool:
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


# Language detection: the result is None unless it is certain, because a false alarm is worse than a missed fault.

_MIN_LETTERS = 12
"""Minimum number of letters for detecting a script; a name or a term may have a few."""
_MIN_HAN = 10
"""Minimum number of Han characters without Kana in a Chinese text; Japanese names and titles are shorter."""
_MIN_SHARE = 0.8
"""Minimum share of letters in one script; texts quote words of other scripts."""
_MIN_PROSE_SHARE = 0.12
"""Minimum share of words that are function words of the language. Prose has a third to a half; lists of names and
terms have few."""
_MIN_DIFFERENT = 4
"""Minimum number of distinct function words; names contain two or three, e.g. `de la Cruz y Vega`."""
_MIN_DISTINCTIVE = 2
"""Minimum number of distinct function words that another language does not have; similar languages share most."""
_MIN_LEAD = 3
"""Factor by which those must outnumber the words that only the other language has; a mixed text has no language."""

_DISTINCTIVE_LETTERS = {
    "CYRILLIC": {"uk": "іїєґ", "ru": "ыэё", "sr": "ђћџљњј"},
    "ARABIC": {"ur": "ٹڈڑےں", "fa": "پچژگ", "ar": "ةىإأ"},
}
"""Letters that only one of the languages with this script uses."""
_HINDI = re.compile(r"(?<!\w)(है|हैं|में|के|की|का|और|नहीं)(?!\w)")
_MARATHI = re.compile(r"(?<!\w)(आहे|आहेत|आणि|नाही)(?!\w)")
_NOT_PROSE = re.compile(r"```.*?(```|\Z)|`[^`\n]*`|https?://\S+|\S+@\S+", re.DOTALL)
_SYMBOLS = re.compile(r"[{}()\[\]=<>_\\/+*|;$#&@^~]")
_WORD = re.compile(r"(?<![\w%])[^\W\d_]+(?!\w)")
_SENTENCE_START = re.compile(r"(?:^|[.!?:\n\"“„«»(¿¡–—-])\W*$")


def detect_language(text: str) -> str | None:
    """Return the language code of a text, or the script if it identifies the language (`GREEK`); None if uncertain."""
    prose = _NOT_PROSE.sub(" ", text)
    script = detect_script(prose)
    if script == "LATIN":
        return _by_function_words(prose)
    if script == "CJK":
        scripts = Counter(map(_script, prose))
        kana, han = scripts["HIRAGANA"] + scripts["KATAKANA"], scripts["CJK"]
        if kana:
            return "ja" if kana * 10 >= han else None
        return "zh" if han >= _MIN_HAN else None
    if script == "DEVANAGARI":
        hindi, marathi = bool(_HINDI.search(prose)), bool(_MARATHI.search(prose))
        return ("hi" if hindi else "mr") if hindi != marathi else None
    if script in _DISTINCTIVE_LETTERS:
        return _by_letters(prose.lower(), _DISTINCTIVE_LETTERS[script])
    return script


def detect_script(text: str) -> str | None:
    """Return the script of nearly all letters, with Han and Kana both as `CJK`, or None if no script dominates."""
    scripts = Counter(_script(letter) for letter in text if letter.isalpha())
    scripts["CJK"] += scripts.pop("HIRAGANA", 0) + scripts.pop("KATAKANA", 0)
    script, letters = scripts.most_common(1)[0]
    # A Han, Kana or Hangul character carries as much information as several letters.
    enough = _MIN_LETTERS / 3 if script in ("CJK", "HANGUL") else _MIN_LETTERS
    return script if letters >= enough and letters >= _MIN_SHARE * scripts.total() else None


@cache
def _script(letter: str) -> str:
    name = unicodedata.name(letter, "?").split(" ")[0].partition("-")[0]
    return {"FULLWIDTH": "LATIN", "HALFWIDTH": "KATAKANA", "IDEOGRAPHIC": "CJK"}.get(name, name)


def _by_letters(text: str, letters_of: dict[str, str]) -> str | None:
    found = {language: sum(text.count(letter) for letter in letters) for language, letters in letters_of.items()}
    # Quoted names contain a letter or two of a similar language.
    best, second, *_ = sorted(found, key=lambda language: -found[language])
    return best if found[best] >= 2 and found[best] >= 4 * found[second] else None


def _by_function_words(text: str) -> str | None:
    # Code is full of brackets and symbols.
    lines = [line for line in text.splitlines() if len(_SYMBOLS.findall(line)) <= 0.04 * len(line)]
    found = Counter(word for line in lines for word in _plain_words(line))
    by_language = {language: words & found.keys() for language, words in function_words().items()}
    best = max(by_language, key=lambda language: len(by_language[language]))
    mine = by_language.pop(best)
    share = sum(found[word] for word in mine) / max(1, sum(len(_WORD.findall(line)) for line in lines))
    if len(mine) < _MIN_DIFFERENT or share < _MIN_PROSE_SHARE:
        return None
    leads = all(
        len(mine - theirs) >= max(_MIN_DISTINCTIVE, _MIN_LEAD * len(theirs - mine)) for theirs in by_language.values()
    )
    return best if leads else None


def _plain_words(line: str) -> list[str]:
    """Return the lower-case words of a line, without names, i.e. capitalised words inside a sentence (`Las Vegas`)."""
    return [
        found[0].lower()
        for found in _WORD.finditer(line.replace("’", "'"))
        if found[0].islower() or (found[0].istitle() and _SENTENCE_START.search(line[: found.start()]))
    ]


@cache
def function_words() -> dict[str, frozenset[str]]:
    """Return the function words of each language, without the one-letter words."""
    table = files("tunewell.evaluation").joinpath("function_words.txt").read_text(encoding="utf-8")
    parts = [line.partition(":") for line in table.splitlines() if not line.startswith("#")]
    return {language: frozenset(words.split()) for language, _, words in parts}
