"""Read the records of CSV, TSV and text files, dispatch the other formats, and reject records that are too large."""

import csv
import re
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.units import size_bytes
from tunewell.data.rows.conversation import Rejected, is_list, is_object
from tunewell.data.rows.json_rows import parse_values, text_of
from tunewell.data.sources.arrow import table_rows
from tunewell.data.sources.base import ReadOptions, SourceFile, require_unique_columns
from tunewell.data.sources.lines import TooLong, numbered_lines, read_lines, read_utf8

MAX_JSON_BYTES = 512 << 20
"""Maximum size of a `.json` file. Parsing takes about eight times as much memory."""
MAX_NESTING = 900
"""Maximum nesting of a file, below Python's recursion limit. Rows have a lower limit, which drops only the row."""
_CONVERSATION_KEYS = frozenset({"messages", "conversations", "conversation"})


def read_json_rows(file: SourceFile, *, encoding: str) -> list[Any]:
    """Return the rows of a JSON file; raise UserError for a file that is too large or not valid JSON."""
    values = _json_values(file, encoding)
    if len(values) == 1:
        return _find_rows(values[0])
    if any(is_list(value) for value in values):
        raise UserError(
            f"`{file.name}` continues after the end of its list",
            fix="put all rows into one list, or each row on one line of a `.jsonl` file",
        )
    return values


def _json_values(file: SourceFile, encoding: str) -> list[Any]:
    data = _read_whole(file, encoding)
    if not data.strip():
        raise UserError(f"`{file.name}` is empty", fix="the file should contain a list of rows: `[{...}, {...}]`")
    try:
        return parse_values(data, max_nesting=MAX_NESTING)
    except Rejected as rejected:
        raise UserError(
            f"`{file.name}` is not valid JSON",
            where=rejected.detail,
            fix="correct the file, or convert it to `.jsonl`, in which an invalid line drops only one row",
        ) from rejected


def read_json_value(file: SourceFile, *, encoding: str) -> Any:
    """Return the value of a JSON file that contains one object; raise UserError like `read_json_rows`."""
    rows = _json_values(file, encoding)
    return rows[0] if len(rows) == 1 else rows


def _read_whole(file: SourceFile, encoding: str) -> bytes:
    blocks: list[bytes] = []
    num_bytes = 0
    for block in read_utf8(file, encoding):
        num_bytes += len(block)
        if num_bytes > MAX_JSON_BYTES:
            raise UserError(
                f"`{file.name}` is larger than {size_bytes(MAX_JSON_BYTES)}, the limit for `.json` files",
                fix="convert the file to .jsonl, which has no limit: `jq -c '.[]' rows.json > rows.jsonl`",
            )
        blocks.append(block)
    return b"".join(blocks)


def _find_rows(value: Any) -> list[Any]:
    if is_list(value):
        return value
    if not is_object(value) or _CONVERSATION_KEYS & value.keys():
        return [value]
    lists = [inner for inner in value.values() if is_list(inner) and inner and is_object(inner[0])]
    if len(lists) == 1:
        return lists[0]
    has_only_objects = bool(value) and all(is_object(inner) for inner in value.values())
    return list(value.values()) if has_only_objects else [value]


_DELIMITERS = ",;\t|"
_HEAD_LINES, _HEAD_BYTES = 40, 1 << 16
_SEPARATOR_LINE = re.compile(r'"?sep=([,;\t|])"?[,;]*', re.IGNORECASE)
"""A first line that Excel reads and hides. It names the delimiter."""
_NAME_COLUMNS = "name the columns in the first line, like `question,answer`, with one row on each line below it"
_MAX_HEADING_CHARS = 80
_MAX_HEADINGS = 3
"""Headings in a row (chapter, section, subsection) that stay with a paragraph. More short lines are a list."""
_SENTENCE_ENDS = ".!?\u2026\"')\u201d\u2019\u00bb\u3002"

Record = Any
"""A parsed record, or `Rejected` if it could not be read."""


def read_records(file: SourceFile, options: ReadOptions) -> Iterator[tuple[int, Record]]:
    """Yield each record, or `Rejected`, with its number from 1; in a `.txt` file, the number of its first line."""
    if file.format in ("txt", "md"):
        return _text_rows(file, options)
    if file.format in ("parquet", "arrow"):
        rows = table_rows(file)
    elif file.format == "excel":
        from tunewell.data.sources.excel import excel_rows  # needs an optional library

        rows = excel_rows(file)
    elif file.format == "json":
        rows = read_json_rows(file, encoding=options.encoding)
    else:
        rows = _csv_rows(file, options)
    return enumerate(rows, start=1)


def too_large(num_bytes: int, max_bytes: int) -> Rejected:
    """Return the rejection of a row that exceeds the size limit."""
    return Rejected("too_large", f"{num_bytes:,} bytes; the limit is {max_bytes:,}")


class _RecordTooLarge(Exception):
    def __init__(self, num_bytes: int) -> None:
        super().__init__(f"it has at least {num_bytes:,} bytes")
        self.num_bytes = num_bytes


class _CsvLines:
    """An iterator that passes lines to the csv module and stops it when a record exceeds the size limit."""

    def __init__(self, file: SourceFile, options: ReadOptions) -> None:
        self._max_bytes = options.max_row_bytes
        self._lines = read_lines(file, encoding=options.encoding, max_bytes=self._max_bytes, keep_ends=True)
        self._waiting: list[str] = []
        self.num_lines = 0
        self.num_bytes = 0
        """The size of the record so far."""

    def __iter__(self) -> "_CsvLines":
        return self

    def __next__(self) -> str:
        if not self._waiting:
            line = next(self._lines)
            self.num_bytes += line.num_bytes if isinstance(line, TooLong) else len(line)
            if isinstance(line, TooLong):
                self.num_lines += 1
            if self.num_bytes > self._max_bytes or isinstance(line, TooLong):
                raise _RecordTooLarge(self.num_bytes)
            # Some files end lines with a bare `\r`. Inside quotes, the csv module joins the parts again.
            self._waiting = re.split(r"(?<=\r)(?!\n)", text_of(line)) if b"\r" in line[:-2] else [text_of(line)]
        self.num_lines += 1
        return self._waiting.pop(0)


def _csv_rows(file: SourceFile, options: ReadOptions) -> Iterator[Record]:
    # The field limit of the csv module is global to the process and lower than the configured row limit.
    csv.field_size_limit(max(options.max_row_bytes, csv.field_size_limit()))
    lines = _CsvLines(file, options)
    reader, names = _csv_head(file, lines, options)
    while True:
        lines.num_bytes, first_line = 0, lines.num_lines + 1
        try:
            values = next(reader)
        except StopIteration:
            return
        except _RecordTooLarge as record:
            yield too_large(record.num_bytes, options.max_row_bytes)
            continue
        except csv.Error as error:
            yield Rejected("unparsable", f"{error} (line {first_line})")
            continue
        if not values or (len(values) == 1 < len(names) and not values[0].strip()):
            continue
        if len(values) == len(names):
            yield dict(zip(names, values, strict=True))
        else:
            yield Rejected("unparsable", f"{len(values)} values for {len(names)} columns (line {first_line})")


def likely_separators(file: SourceFile, encoding: str) -> list[str]:
    """Return the separators that divide the first lines of a table, best first. Several are a tie; none is possible."""
    lines = read_lines(file, encoding=encoding, max_bytes=_HEAD_BYTES, keep_ends=True)
    texts = [text_of(line) for line in islice(lines, _HEAD_LINES) if isinstance(line, bytes) and line.strip()]
    found: dict[str, tuple[float, int]] = {}
    for mark in _DELIMITERS:
        try:
            rows = list(csv.reader(texts, delimiter=mark))
        except csv.Error:  # a binary file
            continue
        if rows and (width := len(rows[0])) > 1:
            found[mark] = sum(len(row) == width for row in rows) / len(rows), width
    best = max((share for share, _ in found.values()), default=0.0)
    return sorted((mark for mark, (share, _) in found.items() if share == best), key=lambda mark: -found[mark][1])


def _csv_head(file: SourceFile, lines: _CsvLines, options: ReadOptions) -> tuple[Iterator[list[str]], list[str]]:
    """Read the column names and detect the separator from the first lines, unless it is set."""
    try:
        head = next((line for line in lines if line.strip()), "")
        delimiters = "\t" if file.format == "tsv" else _DELIMITERS
        if options.separator != "auto":
            delimiters = "\t" if options.separator == "tab" else options.separator
        if named := _SEPARATOR_LINE.fullmatch(head.strip("\r\n")):
            delimiters, head = named[1], next((line for line in lines if line.strip()), "")
        widths = {mark: len(next(csv.reader([head], delimiter=mark), list[str]())) for mark in delimiters}
        delimiter = max(widths, key=widths.__getitem__)
        if sum(width > 1 for width in widths.values()) > 1:
            delimiter = next(iter(likely_separators(file, options.encoding)), delimiter)
        reader = csv.reader(chain([head], lines), delimiter=delimiter, strict=True)
        names = [name.strip() for name in next(reader, list[str]())]
    except (_RecordTooLarge, csv.Error) as error:
        raise UserError(
            f"the first line of `{file.name}` cannot be read as column names: {error}", fix=_NAME_COLUMNS
        ) from error
    if not any(names):
        what = f"the first line of `{file.name}` names no columns" if head.strip() else f"`{file.name}` is empty"
        raise UserError(what, fix=_NAME_COLUMNS)
    shown = f"the first line is {head.strip()[:80]!r}"
    require_unique_columns(names, f"`{file.name}`", shown)
    if names.count("") > 1:
        raise UserError(
            f"the first line of `{file.name}` has {names.count('')} columns without a name",
            where=shown,
            fix="name them, or delete the rows above the header if the first line is a title",
        )
    return reader, names


def _text_rows(file: SourceFile, options: ReadOptions) -> Iterator[tuple[int, Record]]:
    """Split a text file into lines, into paragraphs at blank lines, or not at all.

    A heading is never a paragraph of its own: it stays with the next paragraph. A Markdown code block is not split.
    """
    held, max_bytes = list[str](), options.max_row_bytes
    num_held = first = paragraph = num_headings = 0
    is_code = False

    def finished() -> Iterator[tuple[int, Record]]:
        if num_held > max_bytes:
            yield first, too_large(num_held, max_bytes)
        elif held:
            yield first, {"text": "\n".join(held).rstrip("\n")}

    for number, line in numbered_lines(file, options):
        is_blank = not isinstance(line, TooLong) and not line.strip()
        if file.format == "md" and isinstance(line, bytes) and line.lstrip().startswith((b"```", b"~~~")):
            is_code = not is_code
        if is_blank and not num_held:
            continue
        if is_blank and options.text_rows == "paragraph" and not is_code:
            if num_held > max_bytes or num_headings == _MAX_HEADINGS or not _is_heading(held[paragraph:]):
                yield from finished()
                held, num_held, num_headings = [], 0, 0
            elif held[-1]:
                held.append("")
                num_held += 1
                num_headings += 1
            paragraph = len(held)
            continue
        first = first if num_held else number
        num_held += (line.num_bytes if isinstance(line, TooLong) else len(line)) + bool(num_held)
        if num_held > max_bytes:
            held = []
        elif not isinstance(line, TooLong):
            held.append(text_of(line))
        if options.text_rows == "line":
            yield from finished()
            held, num_held = [], 0
    yield from finished()


def _is_heading(lines: list[str]) -> bool:
    """Return True for a heading, for the metadata at the start of a Markdown file, and for no lines at all."""
    lines = [line.strip() for line in lines if line.strip()]
    if not lines or (len(lines) > 1 and lines[0] == lines[-1] == "---"):
        return True
    if len(lines) == 2 and not lines[1].strip("=-"):  # underlined
        return True
    is_short = len(lines) == 1 and len(lines[0]) <= _MAX_HEADING_CHARS
    return lines[-1].startswith("#") or (is_short and lines[0][-1] not in _SENTENCE_ENDS)
