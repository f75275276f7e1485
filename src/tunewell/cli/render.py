"""Put words on the screen: results on stdout, progress and errors on stderr, all readable without colour."""

import json
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from tunewell.core.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

_MAX_WIDTH = 120


def console() -> "Console":
    """Open stdout for results; colour only in a terminal and without `NO_COLOR`."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True)


def err_console() -> "Console":
    """Open stderr for progress; colour only in a terminal and without `NO_COLOR`."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


def emit(text: str = "") -> None:
    """Write a result to stdout."""
    sys.stdout.write(text + "\n")


def emit_json(value: Any) -> None:
    """Write one JSON object to stdout, valid in whatever encoding stdout has."""
    is_utf8 = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "") == "utf8"
    emit(json.dumps(value, indent=2, ensure_ascii=not is_utf8, allow_nan=False, default=str))


def emit_error(error: UserError) -> None:
    """Write an error a person can mend to stderr."""
    sys.stderr.write(f"error: {error}\n")


def width() -> int:
    """Say how wide text may be: the terminal, at most 120 columns; 100 where there is no terminal."""
    return min(shutil.get_terminal_size((100, 24)).columns, _MAX_WIDTH)


def table(rows: Sequence[Sequence[str]], *, right: Collection[int] = (), gap: int = 3) -> str:
    """Align columns with spaces and no lines; `right` names the columns of numbers, counted from 0.

    model         SmolLM2-135M    135 M parameters
    micro-batch   16,384 tokens   because it fits
    """
    num_columns = max((len(row) for row in rows), default=0)
    widths = [
        max((_cells(row[column]) for row in rows if column < len(row)), default=0) for column in range(num_columns)
    ]
    lines = []
    for row in rows:
        cells = [
            " " * (widths[number] - _cells(cell)) + cell
            if number in right
            else cell + " " * (widths[number] - _cells(cell))
            for number, cell in enumerate(row)
        ]
        lines.append((" " * gap).join(cells).rstrip())
    return "\n".join(lines)


def definitions(entries: Sequence[tuple[str, str]], *, gap: int = 3) -> str:
    """Align words with their meaning, folded to the width of the screen."""
    column = max((_cells(word) for word, _ in entries), default=0) + gap
    lines = []
    for word, meaning in entries:
        folded = textwrap.wrap(meaning, max(width() - column, 40), break_long_words=False, break_on_hyphens=False) or [
            ""
        ]
        lines.append((word + " " * (column - _cells(word)) + folded[0]).rstrip())
        lines += [" " * column + line for line in folded[1:]]
    return "\n".join(lines)


def fold(text: str, *, indent: str = "") -> str:
    """Fold a paragraph to the width of the screen."""
    return textwrap.fill(
        text, width(), initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _cells(text: str) -> int:
    """Count terminal columns: wide characters take two, combining ones none."""
    return sum(
        0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1
        for character in text
    )


# Write to a screen that may go away.


class LastingStream:
    """A stream that may go away, as stderr does with its terminal or its reader; a run goes on without it."""

    def __init__(self, stream: TextIO, *, is_gone: bool = False) -> None:
        self._stream = stream
        self._is_gone = is_gone

    def write(self, text: str) -> int:
        """Write, or forget it; what the stream cannot encode is spelled out."""
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        writable = text.encode(encoding, "backslashreplace").decode(encoding)
        self._try(lambda: self._stream.write(writable))
        return len(text)

    def flush(self) -> None:
        """Flush, or forget it."""
        self._try(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, action: Callable[[], object]) -> None:
        if self._is_gone:
            return
        try:
            action()
        except (OSError, ValueError):  # ValueError: the file was closed
            self._is_gone = True
