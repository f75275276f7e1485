"""Read a row file in blocks that are identified by a hash of their content.

A block is the unit of tokenising and caching. Block boundaries depend only on nearby rows (content-defined chunking),
so a row added in the middle of a file changes one block and not all following blocks.
"""

import hashlib
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import orjson

from tunewell.config.extensions import FORMATS
from tunewell.data.rows.conversation import Rejected
from tunewell.data.rows.json_rows import check_nesting, parse_row, text_of
from tunewell.data.sources.arrow import count_parquet_rows
from tunewell.data.sources.base import SourceFile
from tunewell.data.sources.lines import TooLong, detect_encoding, read_lines, read_utf8
from tunewell.data.sources.records import MAX_JSON_BYTES, MAX_NESTING, read_records, too_large

_HEAD_BYTES = 1 << 16
_MIN_ROWS, _MAX_ROWS, _MAX_BYTES = 512, 4096, 4 << 20
_CUT_MASK = 0x3FF
"""A row whose checksum ends in ten zero bits ends a block: one in 1,024 rows, after the first 512."""


@dataclass
class Block:
    """Consecutive rows of one file. JSON is not parsed until it is needed."""

    numbers: list[int] = field(default_factory=list[int])
    """Line numbers in a `.jsonl` or `.txt` file, else record numbers, from 1. Blank lines count, but are not rows."""
    items: list[Any] = field(default_factory=list[Any])
    """JSON rows as bytes, other rows parsed, and `Rejected` for rows that could not be read."""
    digest: str = ""
    num_bytes: int = 0

    def __len__(self) -> int:
        return len(self.items)


@dataclass(frozen=True)
class ReadOptions:
    """Options that affect how the bytes of a file become rows."""

    max_row_bytes: int
    max_nesting: int
    text_rows: str = "paragraph"
    encoding: str = "auto"
    limit: int | None = None
    format: str = "auto"
    """The configured format; `auto`: files of exported conversations are detected."""
    paths: str = "best"
    assistant: str | None = None
    gap_hours: float = 8.0
    separator: str = "auto"


def read_blocks(file: SourceFile, options: ReadOptions) -> Iterator[Block]:
    """Yield the rows of a file in blocks, at most `limit` rows in total."""
    block, digest = Block(), hashlib.sha256()
    for number, item, raw in islice(_numbered(file, options), options.limit):
        block.numbers.append(number)
        block.items.append(item)
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
        block.num_bytes += len(raw) + 1
        is_cut = len(block) >= _MIN_ROWS and zlib.crc32(raw) & _CUT_MASK == 0
        if is_cut or len(block) >= _MAX_ROWS or block.num_bytes >= _MAX_BYTES:
            block.digest = digest.hexdigest()
            yield block
            block, digest = Block(), hashlib.sha256()
    if len(block):
        block.digest = digest.hexdigest()
        yield block


def _numbered(file: SourceFile, options: ReadOptions) -> Iterator[tuple[int, Any, bytes]]:
    """Yield the number of each row, the row, and the bytes for its hash."""
    file = _with_detected_format(file, options)
    if export := _export_format(file, options):
        yield from _numbered_items(FORMATS.load(export)(file, options), options)
        return
    if file.format != "jsonl":
        yield from _numbered_records(file, options)
        return
    encoding = detect_encoding(file, options.encoding)
    for number, line in enumerate(read_lines(file, encoding=encoding, max_bytes=options.max_row_bytes), start=1):
        if isinstance(line, TooLong):
            yield number, *_rejected(too_large(line.num_bytes, options.max_row_bytes))
        elif line and not line.isspace():
            yield number, line, line


def _numbered_records(file: SourceFile, options: ReadOptions) -> Iterator[tuple[int, Any, bytes]]:
    records = read_records(
        file,
        text_rows=options.text_rows,
        encoding=options.encoding,
        max_bytes=options.max_row_bytes,
        separator=options.separator,
    )
    yield from _numbered_items(records, options)


def _numbered_items(records: Iterable[tuple[int, Any]], options: ReadOptions) -> Iterator[tuple[int, Any, bytes]]:
    for number, record in records:
        if isinstance(record, Rejected):
            yield number, *_rejected(record)
            continue
        # repr is used instead of JSON, because 1 and "1", a date and its text, NaN and null differ for `map` functions.
        raw = record if isinstance(record, bytes) else repr(record).encode("utf-8", "surrogatepass")
        if len(raw) > options.max_row_bytes:
            yield number, *_rejected(too_large(len(raw), options.max_row_bytes))
        else:
            yield number, record, raw


def _rejected(rejected: Rejected) -> tuple[Rejected, bytes]:
    return rejected, b"\n" + str(rejected).encode("utf-8", "surrogatepass")  # no line begins with a line feed


def _with_detected_format(file: SourceFile, options: ReadOptions) -> SourceFile:
    """Detect the format from the content: many `.json` files have one object per line; some `.jsonl` are one list."""
    if file.format == "zip":
        from tunewell.data.sources.archive import open_archive  # not needed for other files

        file = open_archive(file)
    if file.format not in ("json", "jsonl"):
        return file
    encoding = detect_encoding(file, options.encoding)
    lines = read_lines(file, encoding=encoding, max_bytes=options.max_row_bytes)
    first, second = (next((line for line in lines if isinstance(line, TooLong) or line.strip()), b"") for _ in "12")
    if file.format == "jsonl":
        is_list = isinstance(first, bytes) and first.strip() == b"["
        return replace(file, format="json") if is_list else file
    try:
        has_lines = isinstance(first, bytes) and isinstance(orjson.loads(first), dict) and second != b""
    except orjson.JSONDecodeError:
        has_lines = False
    return replace(file, format="jsonl") if has_lines else file


def _export_format(file: SourceFile, options: ReadOptions) -> str | None:
    """Return the format of exported chats that is configured or that the file begins like, or None."""
    if options.format != "auto":
        return options.format if FORMATS.entry(options.format).files else None
    entries = [entry for entry in FORMATS.entries() if file.format in entry.files]
    if not entries:
        return None
    head = text_of(next(read_utf8(file, detect_encoding(file, options.encoding)), b"")[:_HEAD_BYTES])
    return next((entry.name for entry in entries if re.search(entry.head, head, re.DOTALL)), None)


def read_parsed(file: SourceFile, options: ReadOptions) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a file with their numbers, parsed, or `Rejected`; for the readers of exported chats."""
    plain = replace(options, format="messages", limit=None, max_row_bytes=MAX_JSON_BYTES, max_nesting=MAX_NESTING)
    for number, item, _ in _numbered(file, plain):
        try:
            yield number, parse_item(item, plain)
        except Rejected as rejected:
            yield number, rejected


def parse_item(item: Any, options: ReadOptions) -> Any:
    """Return the parsed value of an item, or raise its `Rejected`."""
    if isinstance(item, Rejected):
        raise item
    if isinstance(item, bytes):
        return parse_row(item, max_nesting=options.max_nesting)
    check_nesting(item, options.max_nesting)
    return item


def parsed_rows(files: Iterable[SourceFile], options: ReadOptions) -> Iterator[Any]:
    """Yield the rows of files that can be parsed; the others are counted when a corpus is built."""
    for item in (item for file in files for block in read_blocks(file, options) for item in block.items):
        with suppress(Rejected):
            yield parse_item(item, options)


def count_rows(files: Iterable[SourceFile], options: ReadOptions) -> int:
    """Return the number of rows in files, at most `limit`."""
    total = sum(
        count_parquet_rows(file) if file.format == "parquet" else sum(map(len, read_blocks(file, options)))
        for file in files
    )
    return total if options.limit is None else min(total, options.limit)
