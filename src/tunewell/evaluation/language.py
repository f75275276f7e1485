"""Tell in which language a text is written, and say nothing unless sure."""

import re
import unicodedata
from collections import Counter
from functools import cache
from importlib.resources import files

_MIN_LETTERS = 12
"""Letters of an alphabet below which nothing is said: a name or a term has as many."""
_MIN_HAN = 10
"""Han characters without any Kana from which on a text is Chinese: names and titles in Japanese are shorter."""
_MIN_SHARE = 0.8
"""Share of the letters that must be of one script: texts quote words of others."""
_MIN_PROSE_SHARE = 0.12
"""Share of a text's words that must be its language's function words. They are a third to a half of running text;
lists of names and terms have few."""
_MIN_DIFFERENT = 4
"""Different function words that must be found: two or three also stand in names, `de la Cruz y Vega`."""
_MIN_TELLING = 2
"""Different words that must tell the best language from each other one: close pairs share most of theirs."""
_MIN_LEAD = 3
"""How often the words that speak for another language must fit into those: a text in two languages is in neither."""

_ONE_LANGUAGE = {
    "GREEK": "el",
    "HEBREW": "he",
    "THAI": "th",
    "HANGUL": "ko",
    "BENGALI": "bn",
    "TAMIL": "ta",
    "TELUGU": "te",
    "KANNADA": "kn",
    "MALAYALAM": "ml",
    "GUJARATI": "gu",
    "GURMUKHI": "pa",
    "GEORGIAN": "ka",
    "ARMENIAN": "hy",
    "KHMER": "km",
    "LAO": "lo",
    "MYANMAR": "my",
    "ETHIOPIC": "am",
    "SINHALA": "si",
}
_TELLING = {
    "CYRILLIC": {"uk": "іїєґ", "ru": "ыэё", "sr": "ђћџљњј"},
    "ARABIC": {"ur": "ٹڈڑےں", "fa": "پچژگ", "ar": "ةىإأ"},
}
"""Letters that only one of the languages of a script has; the first language whose letters are found is meant, and
between Russian and Ukrainian only where the other's are not."""
_HINDI = re.compile(r"(?<!\w)(है|हैं|में|के|की|का|और|नहीं)(?!\w)")
_MARATHI = re.compile(r"(?<!\w)(आहे|आहेत|आणि|नाही)(?!\w)")
_NO_PROSE = re.compile(r"```.*?(```|\Z)|`[^`\n]*`|https?://\S+|\S+@\S+", re.DOTALL)
_SYMBOLS = re.compile(r"[{}()\[\]=<>_\\/+*|;$#&@^~]")
_WORD = re.compile(r"(?<![\w%])[^\W\d_]+(?!\w)")
_SENTENCE_START = re.compile(r"(?:^|[.!?:\n\"“„«»(¿¡–—-])\W*$")


def detect_language(text: str) -> str | None:
    """Name the language of a text by its code; None where there is any doubt.

    Danish and Norwegian are one, `da/no`; Czech and Slovak and their like are told apart where words tell, and are None
    where none do.
    """
    prose = _NO_PROSE.sub(" ", text)
    script = detect_script(prose)
    if script == "LATIN":
        return _by_function_words(prose)
    if script == "CJK":
        kana = sum(1 for letter in prose if _script(letter) in ("HIRAGANA", "KATAKANA"))
        han = sum(1 for letter in prose if _script(letter) == "CJK")
        if kana:
            return "ja" if kana * 10 >= han else None
        return "zh" if han >= _MIN_HAN else None
    if script == "DEVANAGARI":
        hindi, marathi = bool(_HINDI.search(prose)), bool(_MARATHI.search(prose))
        return ("hi" if hindi else "mr") if hindi != marathi else None
    if script in _TELLING:
        return _by_letters(prose.lower(), _TELLING[script])
    return _ONE_LANGUAGE.get(script or "")


def detect_script(text: str) -> str | None:
    """Name the script nearly all letters of a text belong to, Han and Kana both as `CJK`; None where there is none."""
    scripts = Counter(_script(letter) for letter in text if letter.isalpha())
    scripts["CJK"] += scripts.pop("HIRAGANA", 0) + scripts.pop("KATAKANA", 0)
    script, letters = scripts.most_common(1)[0]
    # A character of Han, Kana or Hangul says as much as several letters.
    enough = _MIN_LETTERS / 3 if script in ("CJK", "HANGUL") else _MIN_LETTERS
    return script if letters >= enough and letters >= _MIN_SHARE * scripts.total() else None


@cache
def _script(letter: str) -> str:
    name = unicodedata.name(letter, "?").split(" ")[0].partition("-")[0]
    return {"FULLWIDTH": "LATIN", "HALFWIDTH": "KATAKANA", "IDEOGRAPHIC": "CJK"}.get(name, name)


def _by_letters(text: str, telling: dict[str, str]) -> str | None:
    found = {language: sum(text.count(letter) for letter in letters) for language, letters in telling.items()}
    # Quoted names bring a letter or two of a neighbour.
    best, second, *_ = sorted(found, key=lambda language: -found[language])
    return best if found[best] >= 2 and found[best] >= 4 * found[second] else None


def _by_function_words(text: str) -> str | None:
    lines = [line for line in text.splitlines() if _is_prose(line)]
    found = Counter(word for line in lines for word in _plain_words(line))
    by_language = {language: words & found.keys() for language, words in _function_words().items()}
    best = max(by_language, key=lambda language: len(by_language[language]))
    mine = by_language.pop(best)
    share = sum(found[word] for word in mine) / max(1, sum(len(_WORD.findall(line)) for line in lines))
    if len(mine) < _MIN_DIFFERENT or share < _MIN_PROSE_SHARE:
        return None
    leads = all(
        len(mine - theirs) >= max(_MIN_TELLING, _MIN_LEAD * len(theirs - mine)) for theirs in by_language.values()
    )
    return best if leads else None


def _is_prose(line: str) -> bool:
    """Tell a line of prose from one of code, which is full of brackets and signs."""
    return len(_SYMBOLS.findall(line)) <= 0.04 * len(line)


def _plain_words(line: str) -> list[str]:
    """List the words that can be evidence: capitals inside a sentence are names (`Las Vegas`, `Van der Berg`)."""
    return [
        found[0].lower()
        for found in _WORD.finditer(line.replace("’", "'"))
        if found[0].islower() or (found[0].istitle() and _SENTENCE_START.search(line[: found.start()]))
    ]


@cache
def _function_words() -> dict[str, frozenset[str]]:
    table = files("tunewell.evaluation").joinpath("function_words.txt").read_text(encoding="utf-8")
    parts = [line.partition(":") for line in table.splitlines() if not line.startswith("#")]
    return {language: frozenset(words.split()) for language, _, words in parts}
