"""Column headings in other languages, and a guess from the content: which column is the question, which the answer?"""

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any

from tunewell.core.files import read_data

_QUESTION_MARKS = ("?", "？", "؟", ";")
"""Marks at the end of a question; `;` in Greek."""
_MIN_TEXT_CHARS = 2.0


@dataclass(frozen=True)
class ColumnGuess:
    """The columns that are most likely the question and the answer, or a text, by their content."""

    columns: dict[str, str]
    """Our name -> the heading; empty if no column has text."""
    texts: tuple[str, ...]
    """All columns with text, the longest texts first."""


@cache
def _headings() -> dict[str, str]:
    table: dict[str, list[str]] = read_data(__file__, "headings.json")
    return {fold(heading): ours for ours, headings in table.items() for heading in headings}


def fold(name: str) -> str:
    """Return a heading without case, accents, punctuation and double spaces: `Réponse:` is `reponse`."""
    plain = unicodedata.normalize("NFKD", name.replace("_", " ").replace("-", " ")).casefold()
    kept = (mark for mark in plain if not unicodedata.combining(mark) and (mark.isalnum() or mark.isspace()))
    return " ".join("".join(kept).split())


def known_heading(name: str) -> str | None:
    """Return our name for a heading in one of the common languages: `question` for `Frage`; None for other names."""
    return _headings().get(fold(name))


def guess_columns(rows: Sequence[Mapping[str, Any]]) -> ColumnGuess:
    """Guess from the values: the answer is the longest text, and the question the text with most question marks."""
    sizes: dict[str, float] = {}
    asked: dict[str, float] = {}
    for name in dict.fromkeys(str(key) for row in rows for key in row):
        values = [str(row.get(name) or "").strip() for row in rows]
        if not any(mark.isalpha() for value in values for mark in value):
            continue  # numbers and dates
        sizes[name] = fmean(map(len, values))
        asked[name] = fmean(value.endswith(_QUESTION_MARKS) for value in values)
    texts = [name for name in sorted(sizes, key=lambda name: -sizes[name]) if sizes[name] >= _MIN_TEXT_CHARS]
    if len(texts) < 2:
        return ColumnGuess({"text": texts[0]} if texts else {}, tuple(texts))
    question = max(texts, key=lambda name: asked[name])
    answer = next(name for name in texts if name != question)
    if not asked[question]:  # no question marks: the question is usually left of its answer
        question, answer = (name for name in sizes if name in texts[:2])
    return ColumnGuess({"question": question, "answer": answer}, tuple(texts))
