"""Print to the terminal: results on stdout, errors on stderr, aligned tables and wrapped text."""

import json
import os
import re
import shutil
import sys
import unicodedata
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import count, zip_longest
from typing import TYPE_CHECKING, Any, TextIO, cast

from tunewell.core.errors import UserError
from tunewell.core.redact import redact

if TYPE_CHECKING:
    from rich.console import Console

    from tunewell.core.plot import BarChart

_MAX_WIDTH = 120
_MIN_FOLD_WIDTH = 16
_MIN_COLUMN = 24
"""Columns that the text of a table needs; with fewer, it is written below its row."""
_MIN_BAR, _MAX_BAR = 10, 60
_INDENT = 4
_LONGEST_TEXT = 2000
_ERROR_LEAD = re.compile(r"error: |  where: |  fix: +")
_COMMAND = re.compile(r"\(?`(?:\S*/)?(?:tunewell|python[\d.]*|pip|uv|ollama|cd|tensorboard|hf|sh) ")
"""A command in backticks, at the start of a line."""
_WORD = re.compile(
    r"""(?:\d[\d.,]*[ ](?:ms|s|min|h|[KMGT]iB|GB|[MB]|tokens/s|[GT]FLOP/s)(?![\w/])  # a number and its unit
    |[^\s`]|`[^`]*`|`)+""",
    re.VERBOSE,
)
JSON_VERSION = 1
"""Version of the JSON that commands print. It changes if a key is renamed, removed or changes its meaning."""
_OBEYED = re.compile(r"[\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters beyond ASCII, and marks that change the direction of text."""
_CONTROLS = re.compile(rf"[\x00-\x08\x0b-\x1f]|{_OBEYED.pattern}")


def console(*, stderr: bool = False) -> "Console":
    """Return a rich console, which uses colour only in a terminal and without `NO_COLOR`."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)


def has_color(out: "Console") -> bool:
    """Return whether a console shows colours. With `NO_COLOR`, rich still names a colour system."""
    return out.color_system is not None and not out.no_color


def is_interactive() -> bool:
    """Return whether stderr is a terminal that can show a live display. In `CI` it is not."""
    return sys.stderr.isatty() and not os.environ.get("CI") and os.environ.get("TERM") != "dumb"


class AsIs(str):
    """Text that `emit` prints unchanged: redacted JSON, or text with a model's answer."""


def emit(text: str = "") -> None:
    """Write a result to stdout, without secrets."""
    sys.stdout.write((text if isinstance(text, AsIs) else redact(text)) + "\n")


def is_utf8() -> bool:
    """Return whether stdout is UTF-8."""
    return (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "") == "utf8"


def json_text(value: Any, *, has_answer: bool = False) -> AsIs:
    """Return a value as JSON for stdout, without secrets, except in answers of a model.

    An object gets the version of the output, unless it is a record with a version of its own. Terminal control
    characters are escaped; without UTF-8, everything but ASCII.
    """
    if isinstance(value, dict) and "$schema" not in value:
        value = {"format_version": JSON_VERSION, **cast(dict[str, Any], value)}
    text = json.dumps(
        value if has_answer else redact(value), indent=2, ensure_ascii=not is_utf8(), allow_nan=False, default=str
    )
    return AsIs(_OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def escape_controls(text: str) -> str:
    """Escape control characters such as `\\x1b`, and marks that make a line appear as different text."""
    return _CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)


def emit_error(error: UserError) -> None:
    """Write a user error to stderr, folded to the width of a terminal. Control characters are escaped."""
    text = "error: " + escape_controls(str(error))
    if sys.stderr.isatty():
        text = "\n".join(_folded(line) for line in text.splitlines())
    sys.stderr.write(text + "\n")


def _folded(line: str) -> str:
    lead = _ERROR_LEAD.match(line)
    return line if lead is None else hanging(lead[0], line[lead.end() :])


def width() -> int:
    """Return the width for text: the terminal's width, at most 120 columns, or 100 columns without a terminal."""
    return min(shutil.get_terminal_size((100, 24)).columns, _MAX_WIDTH)


def table(rows: Sequence[Sequence[str]], *, right: Collection[int] = (), gap: int = 3) -> str:
    """Align columns with spaces. `right` lists the columns to align right, counted from 0.

    model         SmolLM2-135M    135 M parameters
    micro-batch   16,384 tokens   fits in memory
    """
    widths = [max(map(cell_width, column)) for column in zip_longest(*rows, fillvalue="")]

    def padded(number: int, cell: str) -> str:
        padding = " " * (widths[number] - cell_width(cell))
        return padding + cell if number in right else cell + padding

    return "\n".join((" " * gap).join(map(padded, count(), row)).rstrip() for row in rows)


def folded_table(rows: Sequence[Sequence[str]], *, right: Collection[int] = (), gap: int = 3) -> str:
    """Align columns like `table`, and wrap the last column at the width of the screen.

    If little room is left for the last column, its text is written below each row.
    """
    cells = [[*(" ".join(cell.splitlines()) for cell in row[:-1]), "|"] for row in rows]
    leads = [lead[:-1] for lead in table(cells, right=right, gap=gap).splitlines()]
    texts = [row[-1] for row in rows]
    room = min((width() - cell_width(lead) for lead in leads), default=0)
    if room >= min(_MIN_COLUMN, max(map(cell_width, texts), default=0)):
        return "\n".join(map(hanging, leads, texts))
    below = [f"\n{hanging(' ' * _INDENT, text)}" if text.strip() else "" for text in texts]
    return "\n".join(lead.rstrip() + text for lead, text in zip(leads, below, strict=True))


def bar_table(chart: "BarChart") -> str:
    """Return a chart as a table with its bars as the last column, and what their shades mean.

    memory by phase
    load              1.1 GiB  │█████████
    steps             1.4 GiB  │█████████▒▒▒░░
    """
    from tunewell.core.plot import ASCII

    rows = [[chart.title, *chart.heads], *([shortened(row.label, width() // 3), *row.texts] for row in chart.rows)]
    rows += [[""] * len(rows[0])] if chart.ticks else []
    room = width() + 1 - cell_width(table([[*row, "|"] for row in rows], gap=2).partition("\n")[0])
    bars = ["", *chart.text(min(max(room, _MIN_BAR), _MAX_BAR))]
    shown = table([[*row, bar] for row, bar in zip(rows, bars, strict=True)], right=range(1, len(rows[0])), gap=2)
    text = f"{shown}\n{hanging('', chart.text_legend)}".rstrip()
    return text if is_utf8() else text.translate(ASCII)


def hanging(lead: str, text: str) -> str:
    """Wrap a text at the width of the screen, with a hanging indent of the width of `lead`.

    A command in backticks stays on one line, so that it can be copied. It is indented less if it fits only so, and the
    terminal wraps it if it is still longer.
    """
    indent = cell_width(lead)
    fold_width = max(width() - indent, _MIN_FOLD_WIDTH)
    lines = [""]
    for word in _words(one_line(text), fold_width):
        if lines[-1] and cell_width(lines[-1]) + 1 + cell_width(word) > fold_width:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
        # A path, or text in a script without spaces, is broken at the edge of the screen.
        while cell_width(lines[-1]) > fold_width and not _COMMAND.match(lines[-1]):
            head = fitting(lines[-1], fold_width)
            lines[-1:] = [head, lines[-1][len(head) :]]
    shown = lead
    for number, line in enumerate(lines):
        if indent > 2 and fold_width < cell_width(line) <= width() - 2:
            shown = f"{shown.rstrip()}\n  {line}".lstrip("\n")
        else:
            shown += f"\n{' ' * indent}{line}" if number else line
    return shown.rstrip()


def _words(text: str, fold_width: int) -> Iterator[str]:
    """Yield the words of a text. A command, or other text in backticks that fits on a line, is one word."""
    for word in _WORD.findall(text):
        yield from [word] if cell_width(word) <= fold_width or _COMMAND.match(word) else word.split()


def one_line(text: str, *, encoding: str = "utf-8") -> str:
    """Return a text on one line, without secrets. Control characters and what cannot be encoded are escaped."""
    words = " ".join(redact(text)[:_LONGEST_TEXT].split())
    printable = "".join(character if character.isprintable() else repr(character)[1:-1] for character in words)
    return printable.encode(encoding, "backslashreplace").decode(encoding)


def fitting(text: str, columns: int) -> str:
    """Return the longest prefix of a text that fits in `columns`, but at least one character."""
    end = min(len(text), columns)
    while end > 1 and cell_width(text[:end]) > columns:
        end -= 1
    return text[:end]


def shortened(text: str, columns: int) -> str:
    """Return a text on one line, without its end if it is longer than `columns`."""
    line = one_line(text)
    return line if cell_width(line) <= columns else f"{fitting(line, columns - 3)}..."


def ending(text: str, columns: int) -> str:
    """Return a path or a name without its start if it is longer than `columns`."""
    return text if cell_width(text) <= columns else f"...{fitting(text[::-1], columns - 3)[::-1]}"


def cell_width(text: str) -> int:
    """Return the width of a text in terminal columns. Wide characters take two, combining characters none."""
    return sum(
        0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1
        for character in text
    )


class RedactedStream:
    """A stream that redacts secrets in all text, also in that of other libraries."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text without its secrets."""
        self._stream.write(redact(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class BestEffortStream:
    """A stream that ignores writes after its reader is gone, as for stderr when the terminal closes."""

    def __init__(self, stream: TextIO, *, is_gone: bool = False) -> None:
        self._stream = stream
        self._is_gone = is_gone

    def write(self, text: str) -> int:
        """Write a text if the reader is still there. Characters that cannot be encoded are escaped."""
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        writable = text.encode(encoding, "backslashreplace").decode(encoding)
        self._try(lambda: self._stream.write(writable))
        return len(text)

    def flush(self) -> None:
        """Flush the stream if the reader is still there."""
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
