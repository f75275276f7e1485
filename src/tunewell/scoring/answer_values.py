"""Dates, times, numbers and contacts in answers: find them in a text, and compare them however they are written.

15 January = January 15th = 15 Jan = 15/01/2027 (without the year)      31,400 = 31400 = $31,400 = 31.4 thousand
8:30 pm = 20:30                                                         +49 171 5551234 = +49-171-555-1234
"""

import math
import re
import unicodedata
import zlib
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from tunewell.scoring.words import word_lists

_MONTH_NUMBERS = {name: number for number in range(1, 13) for name in word_lists()[f"month {number}"]}
_MONTH = "(?:" + "|".join(sorted(_MONTH_NUMBERS, key=len, reverse=True)) + r")(?![^\W\d_])\.?"
_DAY = r"\d{1,2}(?:st|nd|rd|th|er|\.|º|ª)?"
_DATE = re.compile(
    rf"(?<![\w.,:/])(?P<day>{_DAY})(?:\s+(?:of|de|di)\s+|[\s-]+)(?P<month>{_MONTH})"
    rf"(?:,?[\s-]+(?:(?:of|de|di)\s+)?(?P<year>\d{{4}})(?![\w/]))?"
    rf"|(?<![\w.])(?P<month2>{_MONTH})\s+(?:the\s+)?(?P<day2>{_DAY})(?![\w/:]|[.,]\d)"
    r"(?:,?\s+(?P<year2>\d{4})(?![\w/]))?"
    r"|(?<![\w-])(?P<iso>\d{4}-\d{2}-\d{2})(?![\w-])"
    r"|(?<![\w./])(?P<numeric>\d{1,2}[./]\d{1,2}[./]\d{4})(?![\w/])"
    r"|(?:(?P<year3>\d{4})年)?(?P<month3>\d{1,2})月(?P<day3>\d{1,2})日",
    re.IGNORECASE,
)

_TIME = re.compile(
    r"(?<![\w.,:/])(?P<hour>[01]?\d|2[0-4])(?:[:.](?P<minute>[0-5]\d)(?!\d))?"
    r"\s*(?P<half>[ap]\.?m\b\.?|o'clock\b|uhr\b|in the (?:morning|afternoon|evening)\b)"
    r"|(?<![\w.,:/])(?P<hour2>[01]?\d|2[0-4]):(?P<minute2>[0-5]\d)(?![\w:]|[.,]\d)",
    re.IGNORECASE,
)
_CONTACT = re.compile(
    r"(?P<email>[\w.+-]+@\w[\w-]*(?:\.[\w-]+)+)|(?:https?://|\bwww\.)[^\s<>\"'()]+(?<![.,;:!?])"
    r"|(?<![\w.,])(?P<phone>(?:\+\d|\(?0\d)[\d ()/-]{4,}\d|\(?\d{3}\)?[ -]\d{3}[ -]\d{4})(?![\w.,]\d)"
)
"""An e-mail address, the address of a page, or a phone number."""
_UNIT_OF = dict[str, str]()
_AMOUNTS = dict[str, tuple[str, float]]()
"""Units with the base unit of their kind, and how much of it they are. A percentage is a share of one."""
for _entry, _names in word_lists().items():
    if _entry.startswith("unit "):
        _unit, *_amount = _entry.split()[1:]
        _UNIT_OF |= dict.fromkeys(_names, _unit)
        if _amount:
            _AMOUNTS[_unit] = ("".join(_amount[1:]), float(_amount[0]))
_SCALES = {"k": 1e3, "thousand": 1e3, "tausend": 1e3, "million": 1e6, "millions": 1e6, "mio": 1e6, "billion": 1e9}
_SMALL, _TENS = word_lists()["small numbers"], word_lists()["tens"]
_WORD_NUMBERS = {name: number for number, name in enumerate(_SMALL)}
_WORD_NUMBERS |= {name: 10 * number for number, name in enumerate(_TENS, start=2)}
_FRACTIONS = {
    "half": 0.5,
    "a half": 0.5,
    "one half": 0.5,
    "a quarter": 0.25,
    "one quarter": 0.25,
    "three quarters": 0.75,
}
_FRACTION = re.compile(
    r"(?<![\w./,:-])(?P<above>\d{1,3})/(?P<below>[1-9]\d{0,2})(?![\w/]|[.,]\d)"
    rf"|\b(?P<name>{'|'.join(sorted(_FRACTIONS, key=len, reverse=True))})\b(?!\s+(?:past|to|an?)\b)",
    re.IGNORECASE,
)
_SPELLED = rf"(?:(?:{'|'.join(_TENS)})[- ](?:{'|'.join(_SMALL[1:10])})|{'|'.join([*_TENS, *_SMALL])})\b"
_NUMBER = re.compile(
    r"(?:(?P<front>US\$|[$€£¥]|USD|EUR|GBP)\s?)?"
    r"(?P<minus>\b(?:minus|negative)\s)?"
    r"(?P<digits>(?<![\w.,:/])(?>-?\d{1,3}(?:[,. '’]\d{3})+(?!\d)(?:[.,]\d+)?|-?\d\d?(?:,\d\d)+,\d{3}(?!\d)(?:\.\d+)?"
    r"|-?\d+(?:[.,]\d+)?(?:e[+-]?\d+\b)?)"
    rf"|\b{_SPELLED})"
    r"(?![:/]\d|[.,]\d|-\d)"
    r"(?:\s?(?P<scale>k|thousand|tausend|million|millions|mio|billion)\b)?"
    r"(?:[\s-]?(?P<unit>per cent|pour cent|por ciento|[%€£$]|[^\W\d_]+))?",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Value:
    """A date, a time, a number or a contact in a text."""

    kind: str
    """`date`, `time`, `number` or `contact`."""
    readings: frozenset[tuple[float, ...]]
    """Possible meanings: (day, month, year or 0), (minutes of the day,), (hash of a contact,), or (number,); `31.400`
    may be 31.4 or 31400."""
    unit: str
    """A unit such as `$` or `%`, or an empty text."""
    start: int
    end: int
    next_word: str = ""
    """The word after a number without a unit: a number of something."""

    def equals(self, other: "Value", known: frozenset[str] = frozenset()) -> bool:
        """Return True if another value has the same meaning as this one, which is the expected value.

        The unit may be missing, unless the number counts something else; `known` are words that may follow it.
        """
        if self.kind != other.kind:
            return False
        pairs = product(self.readings, other.readings)
        if self.kind == "date":
            return any(mine[:2] == theirs[:2] and mine[2] in (0, theirs[2]) for mine, theirs in pairs)
        if not self.is_same_amount(other):
            return False
        return bool(self.unit and other.unit) or not self.unit or not other.next_word or other.next_word in known

    def is_same_amount(self, other: "Value") -> bool:
        """Return True if two numbers are equal in some unit: 5 km and 5000 m, 50% and 0.5. A unit may be missing."""
        if (self.unit == other.unit or not (self.unit and other.unit)) and self.readings & other.readings:
            return True
        (mine, factor), (theirs, other_factor) = (_AMOUNTS.get(one.unit, (one.unit, 1.0)) for one in (self, other))
        # Without a unit, 5000 is not 5 km; but 0.5 is 50%.
        if mine != theirs or self.unit == other.unit:
            return False
        pairs = product(self.readings, other.readings)
        return any(math.isclose(one[0] * factor, two[0] * other_factor, rel_tol=1e-9) for one, two in pairs)

    @property
    def token(self) -> str:
        """The value as a word, equal for all spellings with the same meaning."""
        return f"={self.kind} {'/'.join(f'{part:.12g}' for part in max(self.readings)[:2])}"


@lru_cache(maxsize=4096)  # retrieval judges each passage by the keys of many questions
def find_values(text: str) -> tuple[Value, ...]:
    """Return the dates, times, numbers and contacts of a text in their order."""
    found: list[Value] = []
    for pattern, read in zip(
        (_DATE, _TIME, _CONTACT, _FRACTION, _NUMBER), (_date, _time, _contact, _fraction, _number), strict=True
    ):
        values = [value for match in pattern.finditer(text) if (value := read(match)) is not None]
        found += [one for one in values if not any(old.start < one.end and one.start < old.end for old in found)]
    return tuple(sorted(found, key=lambda value: value.start))


def _date(match: re.Match[str]) -> Value | None:
    parts = {name.rstrip("23"): text for name, text in match.groupdict().items() if text}
    if text := parts.get("iso") or parts.get("numeric"):
        numbers = [int(number) for number in re.split("[-./]", text)]
        readings = [numbers[::-1]] if "iso" in parts else [numbers, [numbers[1], numbers[0], numbers[2]]]
    else:
        name = parts["month"].rstrip(".").lower()
        month = int(name) if name.isdecimal() else _MONTH_NUMBERS[name]
        readings = [[int(re.sub(r"\D", "", parts["day"])), month, int(parts.get("year", 0))]]
    valid = frozenset((day, month, year) for day, month, year in readings if 1 <= day <= 31 and 1 <= month <= 12)
    return Value("date", valid, "", match.start(), match.start() + len(match[0].rstrip("."))) if valid else None


def _time(match: re.Match[str]) -> Value:
    hour, minute = int(match["hour"] or match["hour2"]), int(match["minute"] or match["minute2"] or 0)
    half = (match["half"] or "").lower()
    if half.startswith(("p", "in the a", "in the e")):
        hours = {hour % 12 + 12}
    elif half.startswith(("a", "in the m")):
        hours = {hour % 12}
    else:
        hours = {hour % 24, (hour + 12 * (1 <= hour <= 12)) % 24}
    readings = frozenset((60.0 * one + minute,) for one in hours)
    return Value("time", readings, "", match.start(), match.start() + len(match[0].rstrip(".")))


def _contact(match: re.Match[str]) -> Value:
    text = re.sub(r"\D", "", match[0]) if match["phone"] else match[0].casefold()
    return Value("contact", frozenset({(float(zlib.crc32(text.encode())),)}), "", *match.span())


def _fraction(match: re.Match[str]) -> Value:
    number = _FRACTIONS[match["name"].lower()] if match["name"] else int(match["above"]) / int(match["below"])
    return Value("number", frozenset({(round(number, 6),)}), "", *match.span())


def _number(match: re.Match[str]) -> Value | None:
    scale = _SCALES.get((match["scale"] or "").lower(), 1.0) * (-1 if match["minus"] else 1)
    after, front = (match["unit"] or "").lower(), (match["front"] or "").lower()
    own = _UNIT_OF.get("%" if after in ("per cent", "pour cent", "por ciento") else after, "")
    unit = _UNIT_OF.get(front, own)
    is_part = bool(own) and own == unit
    end = match.end("unit" if is_part else "scale" if match["scale"] else "digits")
    next_word = "" if is_part or front else unicodedata.normalize("NFKC", after).casefold()
    readings = frozenset((float(f"{number * scale:.12g}"),) for number in _read_digits(match["digits"]))
    start = match.start("front" if front else "digits")
    return Value("number", readings, unit, start, end, next_word) if readings else None


def _read_digits(digits: str) -> list[float]:
    """Return the possible meanings of a number."""
    if not digits[-1].isdecimal():
        names = re.split("[- ]", digits.lower())
        # "one" is seldom a number: "one of the best".
        return [] if names == ["one"] else [float(sum(_WORD_NUMBERS[name] for name in names))]
    plain = re.sub("[ '’]", "", digits)
    if "e" in plain.lower():
        return [float(plain.replace(",", "."))]
    marks = re.findall("[.,]", plain)
    whole, _, rest = plain.rpartition(marks[-1]) if marks else (plain, "", "")
    grouped = float(re.sub("[.,]", "", plain))
    fraction = float(re.sub("[.,]", "", whole) + f".{rest}")
    if len(set(marks)) == 2:  # 1,234.5 or 1.234,5
        return [fraction]
    if len(marks) != 1:
        return [grouped]
    if len(rest) != 3 or whole.lstrip("-") == "0":
        return [fraction]
    # "31,400" has a thousands separator; "31.400" is also a decimal number.
    return [grouped] if marks == [","] else [grouped, fraction]
