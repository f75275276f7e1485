"""Column headings in other languages, and a guess from the content: which column is the question, which the answer?"""

import json
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from statistics import fmean
from typing import Any

_QUESTION_MARKS = "?？؟;"
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
    table: dict[str, list[str]] = json.loads(
        files("tunewell.data.rows").joinpath("headings.json").read_text(encoding="utf-8")
    )
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
        if all(_is_number(value) for value in values):
            continue
        sizes[name] = fmean(map(len, values))
        asked[name] = fmean(value.endswith(tuple(_QUESTION_MARKS)) for value in values)
    texts = [name for name in sorted(sizes, key=lambda name: -sizes[name]) if sizes[name] >= _MIN_TEXT_CHARS]
    if len(texts) < 2:
        return ColumnGuess({"text": texts[0]} if texts else {}, tuple(texts))
    question = max(texts, key=lambda name: asked[name])
    if not asked[question]:  # no question marks: the question is usually left of its answer
        order = [name for name in sizes if name in texts[:2]]
        return ColumnGuess({"question": order[0], "answer": order[1]}, tuple(texts))
    answer = next(name for name in texts if name != question)
    return ColumnGuess({"question": question, "answer": answer}, tuple(texts))


def _is_number(text: str) -> bool:
    """Return True for an empty value, a number or a date, which is not a text."""
    return not any(mark.isalpha() for mark in text)
