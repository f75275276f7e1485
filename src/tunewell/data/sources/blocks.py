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
from pathlib import Path
from typing import Any

import orjson

from tunewell.config.extensions import FORMATS
from tunewell.core.errors import UserError
from tunewell.data.rows.conversation import Rejected, attempt, is_object
from tunewell.data.rows.json_rows import check_nesting, parse_row, text_of
from tunewell.data.sources.arrow import count_parquet_rows
from tunewell.data.sources.base import BINARY_FORMATS, ReadOptions, SourceFile, find_files
from tunewell.data.sources.lines import TooLong, detect_encoding, numbered_lines, read_utf8
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
    if file.format == "zip":
        from tunewell.data.sources.archive import open_archive  # not needed for other files

        file = open_archive(file)
    if file.format not in BINARY_FORMATS:
        options = replace(options, encoding=detect_encoding(file, options.encoding))
        file = _with_detected_format(file, options)
    export = _export_format(file, options)
    read = FORMATS.load(export) if export else _json_lines if file.format == "jsonl" else read_records
    for number, record in read(file, options):
        # repr is used instead of JSON, because 1 and "1", a date and its text, NaN and null differ for `map` functions.
        raw = record if isinstance(record, bytes) else repr(record).encode("utf-8", "surrogatepass")
        row = too_large(len(raw), options.max_row_bytes) if len(raw) > options.max_row_bytes else record
        if isinstance(row, Rejected):
            raw = b"\n" + str(row).encode("utf-8", "surrogatepass")  # no line begins with a line feed
        yield number, row, raw


def _json_lines(file: SourceFile, options: ReadOptions) -> Iterator[tuple[int, Any]]:
    for number, line in numbered_lines(file, options):
        if isinstance(line, TooLong):
            yield number, too_large(line.num_bytes, options.max_row_bytes)
        elif line and not line.isspace():
            yield number, line


def _with_detected_format(file: SourceFile, options: ReadOptions) -> SourceFile:
    """Detect the format from the content: many `.json` files have one object per line; some `.jsonl` are one list."""
    if file.format not in ("json", "jsonl"):
        return file
    filled = (line for _, line in numbered_lines(file, options) if isinstance(line, TooLong) or line.strip())
    first, has_more = next(filled, b""), any(True for _ in filled)
    if isinstance(first, TooLong):
        return file
    if file.format == "jsonl":
        return replace(file, format="json") if first.strip() == b"[" else file
    try:
        is_row = is_object(orjson.loads(first))
    except orjson.JSONDecodeError:
        return file
    return replace(file, format="jsonl") if is_row and has_more else file


def _export_format(file: SourceFile, options: ReadOptions) -> str | None:
    """Return the format of exported chats that is configured or that the file begins like, or None."""
    if options.format != "auto":
        return options.format if FORMATS.entry(options.format).files else None
    entries = [entry for entry in FORMATS.entries() if file.format in entry.files]
    if not entries:
        return None
    head = text_of(next(read_utf8(file, options.encoding), b"")[:_HEAD_BYTES])
    return next((entry.name for entry in entries if re.search(entry.head, head, re.DOTALL)), None)


def is_plainly_rows(path: Path) -> bool:
    """Return True for a file of rows; False for a text or JSON object that may be anything, like a licence."""
    try:
        file = find_files(str(path), base=Path())[0]
        if file.format in ("txt", "md", "json"):
            options = ReadOptions(MAX_JSON_BYTES, MAX_NESTING, encoding=detect_encoding(file, "auto"))
            file = _with_detected_format(file, options)
            is_list = file.format == "json" and next(read_utf8(file, options.encoding), b"").lstrip()[:1] == b"["
            return file.format == "jsonl" or is_list or _export_format(file, options) is not None
    except (UserError, OSError):
        return False
    return file.format != "zip"


def read_parsed(file: SourceFile, options: ReadOptions) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a file with their numbers, parsed, or `Rejected`; for the readers of exported chats."""
    plain = replace(options, format="messages", limit=None, max_row_bytes=MAX_JSON_BYTES, max_nesting=MAX_NESTING)
    for number, item, _ in _numbered(file, plain):
        yield number, attempt(parse_item, item, plain)


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
