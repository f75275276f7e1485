"""Recorded answers of a hosted model, one JSON object per line. The first line names the model and how it was asked.

{"format": "tunewell-answers", "model": "ft:small:me", "url": "https://HOST/v1", "max_tokens": 64, ...}
{"id": "5f0c...", "question": "...", "reference": "...", "answer": "...", "end": "stop", "seconds": 0.8, ...}
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.files import open_file, sha256_text
from tunewell.records.events import parse_object, read_events

FORMAT, _VERSION = "tunewell-answers", 1
_HEAD_BYTES = 1 << 16


@dataclass(frozen=True)
class RecordedAnswers:
    """The answers of one model, and the seconds that each took, by the id of their question."""

    path: Path
    model: str
    url: str
    answers: dict[str, tuple[str, float]]


def is_begun(path: Path) -> bool:
    """Return whether there is something at a path. A process may have been killed before it wrote the first line."""
    return path.exists() and path.stat().st_size > 0


def question_id(question: str) -> str:
    """Return the id of a question: a hash of its text, in which any white space is the same."""
    return sha256_text(" ".join(question.split()))[:32]


def header_of(url: str, model: str, **options: Any) -> dict[str, Any]:
    """Return the first line of a new file."""
    return {"format": FORMAT, "format_version": _VERSION, "model": model, "url": url, **options}


def is_answers_file(path: Path) -> bool:
    """Return whether a path is a file of recorded answers."""
    try:
        if not path.is_file():
            return False
        with open_file(path) as file:
            return (parse_object(file.readline(_HEAD_BYTES)) or {}).get("format") == FORMAT
    except (OSError, ValueError):  # a name that no disk accepts
        return False


def read_answers(path: Path) -> RecordedAnswers:
    """Read a file of recorded answers; raise UserError if it is another file or damaged."""
    if not is_answers_file(path) or not (lines := read_events(path)):
        raise UserError(f"`{path}` has no recorded answers", fix="name a file of `tunewell compare --record FILE`")
    head, *lines = lines
    if head.get("format_version") != _VERSION:
        raise UserError(f"`{path}` was written by a newer version of tunewell", fix="update tunewell")
    try:
        found = {line["id"]: (line["answer"].strip(), float(line["seconds"])) for line in lines}
        return RecordedAnswers(path, str(head["model"]), str(head["url"]), found)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UserError(f"`{path}` is damaged", fix="restore it, or record the answers again") from None
