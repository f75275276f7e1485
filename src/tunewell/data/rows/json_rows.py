"""Parse JSON rows strictly: invalid JSON, duplicate keys, NaN and deep nesting are rejected with a reason."""

import codecs
import json
import math
import re
from collections import Counter
from collections.abc import Container, Iterable
from typing import Any

from tunewell.data.rows.conversation import Rejected, is_object

_CONTAINERS: tuple[type[Any], ...] = (dict, list)
_SCALARS: frozenset[type[Any]] = frozenset((int, float, bool))
_MAX_DIGITS = 4300
"""Python's limit on the digits of an integer. Parsing longer integers takes more than linear time."""
_NOT_SPACE = re.compile(r"[^ \t\r\n]|\Z")


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
    if math.isinf(number):
        raise Rejected("unparsable", f"the number {digits[:20]} is out of range")
    return number


_STRICT, _WITH_NUL = (
    json.JSONDecoder(
        strict=is_strict,
        object_pairs_hook=_unique_keys,
        parse_constant=_reject_constant,
        parse_int=_parse_int,
        parse_float=_parse_float,
    )
    for is_strict in (True, False)
)
"""orjson is not used: it drops duplicate keys and rounds large integers in silence, and checking its result takes as
long as this parser."""


def parse_row(line: bytes, *, max_nesting: int) -> Any:
    """Parse a row or raise Rejected with `unparsable`, `bad_text` or `too_large`.

    Lone surrogates and NULs are not changed here; the cleaning step handles them.
    """
    line = line.removeprefix(codecs.BOM_UTF8)  # from concatenated files with byte order marks
    text = text_of(line)
    try:
        value = _parse_text(text)
    except RecursionError:
        raise _too_deep(max_nesting) from None
    except ValueError as error:
        if "\0" in text:
            raise Rejected("bad_text", f"a NUL at byte {line.index(0)}") from error
        try:
            line.decode("utf-8")
        except UnicodeDecodeError as bad:
            raise Rejected("bad_text", f"byte {bad.start} is not UTF-8") from bad
        raise Rejected("unparsable", str(error)) from error
    check_nesting(value, max_nesting)
    return value


def _parse_text(text: str) -> Any:
    try:
        return _STRICT.decode(text)
    except ValueError:
        if "\0" in text:
            return _WITH_NUL.decode(text)
        raise


def parse_values(data: bytes, *, max_nesting: int) -> list[Any]:
    """Parse one JSON value or several consecutive ones; raise Rejected like `parse_row`."""
    try:
        return [parse_row(data, max_nesting=max_nesting)]
    except Rejected as rejected:
        if not rejected.detail.startswith("Extra data"):
            raise
    text, values, position = text_of(data), list[Any](), 0
    try:
        while (position := _NOT_SPACE.search(text, position).start()) < len(text):  # type: ignore[union-attr]
            value, position = _STRICT.raw_decode(text, position)
            check_nesting(value, max_nesting)
            values.append(value)
    except RecursionError:
        raise _too_deep(max_nesting) from None
    except ValueError as error:
        raise Rejected("unparsable", str(error)) from error
    return values


def check_nesting(value: Any, max_nesting: int) -> None:
    """Raise Rejected if a value is nested too deeply."""
    level: list[Any] = [value] if type(value) in _CONTAINERS else []
    for _ in range(max_nesting):
        deeper: list[Any] = []
        for container in level:
            values: Iterable[Any] = container.values() if is_object(container) else container
            deeper += [inner for inner in values if type(inner) in _CONTAINERS]
        if not deeper:
            return
        level = deeper
    raise _too_deep(max_nesting)


def _too_deep(max_nesting: int) -> Rejected:
    return Rejected("too_large", f"nested more than {max_nesting} levels deep")


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
