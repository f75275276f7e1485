"""Fold, split and shorten text, and detect its language by scripts and the words of `function_words.txt`."""

import re
import string
import unicodedata
from collections import Counter
from functools import cache
from importlib.resources import files

_INVISIBLE = dict.fromkeys(map(ord, "\u200b\u2060\ufeff\u00ad"))
_ONE_SPELLING = str.maketrans({"’": "'", "‘": "'", "ʼ": "'", "−": "-", "‐": "-", "–": "-", "—": " ", "―": " "})
SPACELESS = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
"""Thai, Lao, Burmese, Khmer, Kana and Han: scripts without spaces between words."""
SPACELESS_LETTER = re.compile(f"[{SPACELESS}\U00020000-\U0003ffff]")


def fold(text: str) -> str:
    """Return a text without differences in case, width, invisible characters and the form of quotes and dashes."""
    plain = unicodedata.normalize("NFKC", text.translate(_INVISIBLE)).translate(_ONE_SPELLING)
    # casefold() can undo the normalisation, for example of U+0345.
    return unicodedata.normalize("NFKC", plain.casefold())


def split_words(text: str) -> list[str]:
    """Split text into words without case and punctuation; in scripts without spaces, each character is a word."""
    letters = (" " if is_punctuation(letter) else letter for letter in fold(text))
    return space_out("".join(letters)).split()


def space_out(text: str) -> str:
    """Return a text with spaces around each character of a script without spaces."""
    return SPACELESS_LETTER.sub(r" \g<0> ", text)


def is_punctuation(letter: str) -> bool:
    """Return True for ASCII and Unicode punctuation."""
    return letter in string.punctuation or unicodedata.category(letter).startswith("P")


def shorten(text: str, max_chars: int = 100, *, mark: str = "...") -> str:
    """Return a text cut to `max_chars` characters, with a mark at the cut."""
    return text if len(text) <= max_chars else text[: max_chars - len(mark)].rstrip() + mark


def shorten_line(text: str, max_chars: int = 100) -> str:
    """Return a text on one line, cut to `max_chars` characters."""
    return shorten(" ".join(text.split()), max_chars)


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

_LIKELY_SHARE = 0.2
"""Minimum share of letters in another script than Latin for a guess: questions about code mix both."""
_LIKELY_CHARS = 200_000
_LIKELY_WORDS, _LIKELY_WORDS_SHARE, _LIKELY_LEAD = 12, 0.05, 1.2
"""For a guess: minimum number of words, share of function words, and lead over the next language. A word counts by the
number of languages that have it."""
_LIKELY = {
    **{"CYRILLIC": "ru", "ARABIC": "ar", "DEVANAGARI": "hi", "GREEK": "el", "HEBREW": "he", "THAI": "th"},
    **{"HANGUL": "ko", "CJK": "zh"},
}
"""The language of most texts with a script."""
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


def likely_language(text: str) -> str | None:
    """Return the likeliest language of a sample of many rows or documents, by its code; None if no language is likely.

    Unlike in `detect_language`, parts of the sample may be in another language or in none.
    """
    text = text[:_LIKELY_CHARS]
    scripts = _scripts(text)
    other, letters = next(((name, number) for name, number in scripts.most_common() if name != "LATIN"), ("", 0))
    if letters > _LIKELY_SHARE * scripts.total():
        found = detect_language(text)
        return _LIKELY.get(found, found) if found else _LIKELY.get(other)
    words = Counter(found[0].lower() for found in _WORD.finditer(text))
    if words.total() < _LIKELY_WORDS:
        return None
    tables = function_words()
    weights = Counter(word for table in tables.values() for word in table)
    scores = {
        language: sum(words[word] / weights[word] for word in table & words.keys())
        for language, table in tables.items()
    }
    best, second = sorted(scores, key=lambda language: -scores[language])[:2]
    share = sum(words[word] for word in tables[best]) / words.total()
    return best if share >= _LIKELY_WORDS_SHARE and scores[best] > _LIKELY_LEAD * scores[second] else None


def detect_script(text: str) -> str | None:
    """Return the script of nearly all letters, with Han and Kana both as `CJK`, or None if no script dominates."""
    scripts = _scripts(text)
    script, letters = max(scripts.items(), key=lambda pair: pair[1])
    # A Han, Kana or Hangul character carries as much information as several letters.
    enough = _MIN_LETTERS / 3 if script in ("CJK", "HANGUL") else _MIN_LETTERS
    return script if letters >= enough and letters >= _MIN_SHARE * scripts.total() else None


def _scripts(text: str) -> Counter[str]:
    scripts = Counter(_script(letter) for letter in text if letter.isalpha())
    scripts["CJK"] += scripts.pop("HIRAGANA", 0) + scripts.pop("KATAKANA", 0)
    return scripts


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
    table = files("tunewell.core").joinpath("function_words.txt").read_text(encoding="utf-8")
    parts = [line.partition(":") for line in table.splitlines() if not line.startswith("#")]
    return {language: frozenset(words.split()) for language, _, words in parts}
