"""Read the rows of a `.json` file, which is parsed as a whole.

    [row, row]                     the elements of the list
    {"data": [row, row], ...}      the elements of the only list of objects
    {"id1": row, "id2": row}       the values, if all of them are objects
    row row row                    objects that follow one another
    row                            one row

A file with a syntax error is rejected as a whole. In a `.jsonl` file an error costs one line.
"""

from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.units import size_bytes
from tunewell.data.rows.conversation import Rejected
from tunewell.data.rows.json_rows import parse_values
from tunewell.data.sources.files import SourceFile
from tunewell.data.sources.lines import read_utf8

MAX_JSON_BYTES = 512 << 20
"""Parsing takes about eight times the size of the file in memory."""
_MAX_NESTING = 900
"""Below orjson's own limit of 1,024. Rows have a lower limit, which costs one row."""
_CONVERSATION_KEYS = frozenset({"messages", "conversations", "conversation"})


def read_json_rows(file: SourceFile, *, encoding: str) -> list[Any]:
    """Return the rows of a JSON file; raise UserError for a file that is too large or not valid JSON."""
    data = _read_whole(file, encoding)
    if not data.strip():
        raise UserError(f"`{file.name}` is empty", fix="it should contain a list of rows: `[{...}, {...}]`")
    try:
        values = parse_values(data, max_nesting=_MAX_NESTING)
    except Rejected as rejected:
        raise UserError(
            f"`{file.name}` is not valid JSON",
            where=rejected.detail,
            fix="correct it there; or convert the file to `.jsonl`, where a broken line costs one row",
        ) from rejected
    if len(values) == 1:
        return _find_rows(values[0])
    if any(isinstance(value, list) for value in values):
        raise UserError(
            f"`{file.name}` continues after the end of its list",
            fix="put all rows into one list, or one on each line of a `.jsonl` file",
        )
    return values


def _read_whole(file: SourceFile, encoding: str) -> bytes:
    blocks, num_bytes = [], 0
    for block in read_utf8(file, encoding):
        num_bytes += len(block)
        if num_bytes > MAX_JSON_BYTES:
            raise UserError(
                f"`{file.name}` is larger than {size_bytes(MAX_JSON_BYTES)}, the limit for `.json` files",
                fix="convert it to .jsonl, which has no limit: `jq -c '.[]' rows.json > rows.jsonl`",
            )
        blocks.append(block)
    return b"".join(blocks)


def _find_rows(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    if not isinstance(value, dict) or _CONVERSATION_KEYS & value.keys():
        return [value]
    lists = [inner for inner in value.values() if isinstance(inner, list) and inner and isinstance(inner[0], dict)]
    if len(lists) == 1:
        return lists[0]
    has_only_objects = bool(value) and all(isinstance(inner, dict) for inner in value.values())
    return list(value.values()) if has_only_objects else [value]
