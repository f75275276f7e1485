"""Blocks of a document, the common output of all readers, and the decoding of text files."""

import codecs
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["heading", "text", "list", "table", "code", "row"]
_BOMS = (
    (codecs.BOM_UTF32_LE, "utf-32"),  # starts like UTF-16
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_NOT_CP1252 = b"\x81\x8d\x8f\x90\x9d"


@dataclass(frozen=True)
class TextBlock:
    """A heading, or a piece of text that belongs together: a paragraph, a list, a table, code, a row of data."""

    kind: Kind
    text: str
    level: int = 0
    """The level of a heading, from 1; 0 for other blocks."""
    lines: tuple[int, int] | None = None
    """The first and the last line in the file, from 1; None if the format has no lines."""
    page: int | None = None
    header: str = ""
    """The header row of a table, repeated when the table is split."""


@dataclass
class ParsedDocument:
    """The blocks of a document in reading order."""

    blocks: list[TextBlock] = field(default_factory=list[TextBlock])
    title: str | None = None
    notes: list[str] = field(default_factory=list[str])

    @property
    def first_heading(self) -> str | None:
        """The first heading of level 1, which is the title of most documents."""
        return next((block.text for block in self.blocks if block.level == 1), None)


class Unreadable(Exception):
    """A document without usable text. `reason` is a key of `documents.SKIP_REASONS`."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason


def split_lines(text: str) -> list[str]:
    """Return the lines as an editor numbers them; `str.splitlines` also splits at form feeds and other signs."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def decode(data: bytes, *, declared: str | None = None) -> tuple[str, list[str]]:
    """Return the text of a file, and a note if it is not UTF-8. Raise Unreadable for binary data.

    `declared` is the encoding that the file itself names.
    """
    encoding = next((name for mark, name in _BOMS if data.startswith(mark)), "utf-8")
    try:
        text = data.decode(encoding)
        notes = []
    except UnicodeDecodeError:
        if encoding != "utf-8":
            raise Unreadable("not_text") from None
        text, notes = _decode_old(data, declared)
    # Text files contain tabs, line breaks and form feeds, but hardly any other control characters.
    controls = sum(text.count(chr(code)) for code in range(32) if chr(code) not in "\t\n\r\f\x1b")
    if controls > len(text) // 100:
        raise Unreadable("not_text")
    return text, notes


def _decode_old(data: bytes, declared: str | None) -> tuple[str, list[str]]:
    """Return text that is not Unicode: in the declared encoding, or in the one of Windows."""
    try:
        if declared:
            return data.decode(declared), []
    except (UnicodeDecodeError, LookupError):
        pass
    if any(byte in data for byte in _NOT_CP1252):
        raise Unreadable("not_text")
    return data.decode("cp1252"), ["read as cp1252 (Windows); save it as UTF-8 if letters look wrong"]
