"""Parse JSON rows strictly: invalid JSON, duplicate keys, NaN and deep nesting are rejected with a reason."""

import codecs
import json
import math
import re
from collections import Counter
from collections.abc import Container, Iterable
from typing import Any

import orjson

from tunewell.data.rows.conversation import Rejected, is_object

_MIN_EXACT, _MAX_EXACT = -float(2**63), float(2**64)
"""orjson reads integers beyond these as rounded floats."""
_CONTAINERS: tuple[type[Any], ...] = (dict, list)
_SCALARS: frozenset[type[Any]] = frozenset((int, float, bool))
_MAX_DIGITS = 4300
"""Python's limit on the digits of an integer. Parsing longer integers takes more than linear time."""
_NOT_SPACE = re.compile(r"[^ \t\r\n]|\Z")
# Strings are matched as a whole, so that brackets inside them do not count. An unterminated string extends to the end.
_BRACKET = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}]', re.DOTALL)


def parse_row(line: bytes, *, max_nesting: int) -> Any:
    """Parse a row or raise Rejected with `unparsable`, `bad_text` or `too_large`.

    orjson parses nearly all rows. Rows that orjson rejects or might change silently are parsed again by the slower
    parser of the standard library. Lone surrogates and NULs are not changed here; the cleaning step handles them.
    """
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        return _parse_slowly(line, max_nesting)
    # orjson silently drops duplicate keys; the number of quotes shows whether this happened.
    has_duplicate = b"\\u0022" in line or orjson.dumps(value).count(b'"') != line.count(b'"')
    has_huge_number = check_nesting(value, max_nesting)
    return _parse_slowly(line, max_nesting) if has_duplicate or has_huge_number else value


def parse_values(data: bytes, *, max_nesting: int) -> list[Any]:
    """Parse one JSON value or several consecutive ones; raise Rejected like `parse_row`."""
    try:
        return [parse_row(data, max_nesting=max_nesting)]
    except Rejected as rejected:
        if not rejected.detail.startswith("Extra data"):
            raise
    text, decoder = text_of(data), _decoder()
    values: list[Any] = []
    position = 0
    while (position := _NOT_SPACE.search(text, position).start()) < len(text):  # type: ignore[union-attr]
        try:
            value, position = decoder.raw_decode(text, position)
        except ValueError as error:
            raise Rejected("unparsable", str(error)) from error
        values.append(value)
    return values


def check_nesting(value: Any, max_nesting: int) -> bool:
    """Raise Rejected if a value is nested too deeply; return True if orjson may have rounded a large integer."""
    level: list[Any] = [[value]]
    depth, has_huge = -1, False
    while level:
        depth += 1
        if depth > max_nesting:
            raise _too_deep(max_nesting)
        deeper: list[Any] = []
        for container in level:
            values: Iterable[Any] = container.values() if is_object(container) else container
            for inner in values:
                if type(inner) in _CONTAINERS:
                    deeper.append(inner)
                elif type(inner) is float and not _MIN_EXACT < inner < _MAX_EXACT:
                    has_huge = True
        level = deeper
    return has_huge


def numbers_as_text(row: dict[str, Any], columns: Container[str]) -> dict[str, Any]:
    """Return the row with JSON text for numbers, true and false in these columns; the same object if there are none."""
    if _SCALARS.isdisjoint(map(type, row.values())):
        return row
    numbers = {key: value for key, value in row.items() if type(value) in _SCALARS and key in columns}
    texts = {key: json.dumps(value) for key, value in numbers.items() if math.isfinite(value)}  # NaN: an empty cell
    return row | texts if texts else row


def text_of(line: bytes) -> str:
    """Decode UTF-8. Invalid bytes become lone surrogates, which the cleaning step detects."""
    for errors in ("strict", "surrogatepass"):
        try:
            return line.decode("utf-8", errors)
        except UnicodeDecodeError:
            continue
    return line.decode("utf-8", "surrogateescape")


def _parse_slowly(line: bytes, max_nesting: int) -> Any:
    if _nests_deeper(line, max_nesting):
        raise _too_deep(max_nesting)
    line = line.removeprefix(codecs.BOM_UTF8)  # from concatenated files with byte order marks
    text = text_of(line)
    try:
        return _loads(text)
    except ValueError as error:
        problem = error
    if "\0" in text:
        try:
            return _loads(text, is_strict=False)
        except ValueError:
            raise Rejected("bad_text", f"a NUL at byte {line.index(0)}") from problem
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as bad:
        raise Rejected("bad_text", f"byte {bad.start} is not UTF-8") from bad
    raise Rejected("unparsable", str(problem)) from problem


def _loads(text: str, *, is_strict: bool = True) -> Any:
    try:
        return _decoder(is_strict).decode(text)
    except RecursionError as error:
        raise Rejected("too_large", "nested too deeply") from error


def _decoder(is_strict: bool = True) -> json.JSONDecoder:
    return json.JSONDecoder(
        strict=is_strict,
        object_pairs_hook=_unique_keys,
        parse_constant=_reject_constant,
        parse_int=_parse_int,
        parse_float=_parse_float,
    )


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise Rejected("unparsable", f"duplicate key {key!r}")
    return value


def _reject_constant(name: str) -> Any:
    raise Rejected("unparsable", f"{name} is not JSON")


def _parse_int(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise Rejected("unparsable", f"an integer with {len(digits):,} digits")
    return int(digits)


def _parse_float(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise Rejected("unparsable", f"the number {digits[:20]} is out of range")
    return number


def _too_deep(max_nesting: int) -> Rejected:
    return Rejected("too_large", f"nested more than {max_nesting} levels deep")


def _nests_deeper(line: bytes, max_nesting: int) -> bool:
    depth = 0
    for found in _BRACKET.finditer(line):
        byte = line[found.start()]
        if byte in b"[{":
            depth += 1
            if depth > max_nesting:
                return True
        elif byte in b"]}":
            depth -= 1
    return False
