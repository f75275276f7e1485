"""Cut a source into blocks of rows that are known by their content.

A block is what gets tokenised, cached and, after a crash or a change, found again. Its ends depend on the rows around
them only, so that a row added in the middle of a file changes one block and not all that follow.
"""

import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import orjson

from tunewell.data.rows.conversation import Rejected
from tunewell.data.rows.json_rows import check_nesting, parse_row
from tunewell.data.sources.files import SourceFile
from tunewell.data.sources.lines import TooLong, encoding_of, read_lines
from tunewell.data.sources.records import read_records, too_large

_MIN_ROWS, _MAX_ROWS, _MAX_BYTES = 512, 4096, 4 << 20
_CUT_MASK = 0x3FF
"""A row whose checksum ends in ten zero bits ends a block: one in 1,024 after the first 512."""


@dataclass
class Block:
    """Consecutive rows of one file, unparsed where parsing can wait until it is known to be needed."""

    numbers: list[int] = field(default_factory=list)
    """1-based: the line in a `.jsonl` or `.txt`, the record elsewhere. Blank lines have a number but are no rows."""
    items: list[Any] = field(default_factory=list)
    """JSON as bytes; parsed records otherwise; `Rejected` where reading failed."""
    digest: str = ""
    num_bytes: int = 0

    def __len__(self) -> int:
        return len(self.items)


@dataclass(frozen=True)
class ReadOptions:
    """What decides how a file's bytes become rows."""

    max_row_bytes: int
    max_nesting: int
    text_rows: str = "line"
    encoding: str = "auto"
    limit: int | None = None


def read_blocks(file: SourceFile, options: ReadOptions) -> Iterator[Block]:
    """Yield the rows of a file in blocks, at most `limit` rows in all."""
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
    """Give each row its number, the row, and the bytes it is known by."""
    file = _by_content(file, options)
    if file.format != "jsonl":
        yield from _numbered_records(file, options)
        return
    encoding = encoding_of(file, options.encoding)
    for number, line in enumerate(read_lines(file, encoding=encoding, max_bytes=options.max_row_bytes), start=1):
        if isinstance(line, TooLong):
            yield number, *_refused(too_large(line.num_bytes, options.max_row_bytes))
        elif line and not line.isspace():
            yield number, line, line


def _numbered_records(file: SourceFile, options: ReadOptions) -> Iterator[tuple[int, Any, bytes]]:
    records = read_records(
        file, text_rows=options.text_rows, encoding=options.encoding, max_bytes=options.max_row_bytes
    )
    for number, record in records:
        if isinstance(record, Rejected):
            yield number, *_refused(record)
            continue
        # Not as JSON: 1 and "1", a date and its text, NaN and null must differ, since a function of the user's sees it.
        raw = record if isinstance(record, bytes) else repr(record).encode("utf-8", "surrogatepass")
        if len(raw) > options.max_row_bytes:
            yield number, *_refused(too_large(len(raw), options.max_row_bytes))
        else:
            yield number, record, raw


def _refused(rejected: Rejected) -> tuple[Rejected, bytes]:
    return rejected, b"\n" + str(rejected).encode("utf-8", "surrogatepass")  # no line begins so


def _by_content(file: SourceFile, options: ReadOptions) -> SourceFile:
    """See through a name: many a `.json` has one object a line, and some a `.jsonl` is one list."""
    if file.format not in ("json", "jsonl"):
        return file
    encoding = encoding_of(file, options.encoding)
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


def parse_item(item: Any, options: ReadOptions) -> Any:
    """Give a block's item its parsed value, or raise the `Rejected` it stands for."""
    if isinstance(item, Rejected):
        raise item
    if isinstance(item, bytes):
        return parse_row(item, max_nesting=options.max_nesting)
    check_nesting(item, options.max_nesting)
    return item
