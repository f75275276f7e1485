"""Parse one row of JSON strictly: no duplicate keys, no NaN, no bottomless nesting, and every refusal says why."""

import codecs
import json
import re
from collections import Counter
from typing import Any

import orjson

from tunewell.data.rows.conversation import Rejected

_MAX_EXACT = float(2**64)
_MAX_DIGITS = 4300
"""Python's own limit, above which reading a whole number takes more than linear time."""
_NOT_SPACE = re.compile(r"[^ \t\r\n]|\Z")
# A string is passed over as one, so that brackets in it do not count; one that never ends goes to the end.
_BRACKET = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}]', re.DOTALL)


def parse_row(line: bytes, *, max_nesting: int) -> Any:
    """Parse a row or raise Rejected with `unparsable`, `bad_text` or `too_large`.

    orjson does nearly all rows; what it refuses, or could have changed unseen, is looked at again by the slower
    parser of the standard library. Lone surrogates and NULs come through as such and are judged later.
    """
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        return _parse_slowly(line, max_nesting)
    # Every key and string has two quotes, so a key that orjson dropped as a duplicate shows in their number.
    has_duplicate = b"\\u0022" in line or orjson.dumps(value).count(b'"') != line.count(b'"')
    has_huge_number = check_nesting(value, max_nesting)
    return _parse_slowly(line, max_nesting) if has_duplicate or has_huge_number else value


def parse_values(data: bytes, *, max_nesting: int) -> list[Any]:
    """Parse one JSON value, or several that follow one another; raise Rejected as `parse_row` does."""
    try:
        return [parse_row(data, max_nesting=max_nesting)]
    except Rejected as rejected:
        if not rejected.detail.startswith("Extra data"):
            raise
    text, decoder = text_of(data), _decoder()
    values, position = [], 0
    while (position := _NOT_SPACE.search(text, position).start()) < len(text):  # type: ignore[union-attr]
        try:
            value, position = decoder.raw_decode(text, position)
        except ValueError as error:
            raise Rejected("unparsable", str(error)) from error
        values.append(value)
    return values


def check_nesting(value: Any, max_nesting: int) -> bool:
    """Raise Rejected when a value nests too deep; tell whether it holds a number beyond 64 bits, as orjson rounds."""
    level, depth, has_huge = [[value]], -1, False
    while level:
        depth += 1
        if depth > max_nesting:
            raise _too_deep(max_nesting)
        deeper = []
        for container in level:
            for inner in container.values() if type(container) is dict else container:
                kind = type(inner)
                if kind is dict or kind is list:
                    deeper.append(inner)
                elif kind is float and not -_MAX_EXACT < inner < _MAX_EXACT:
                    has_huge = True
        level = deeper
    return has_huge


def text_of(line: bytes) -> str:
    """Decode UTF-8; what is none comes as lone surrogates, which cleaning finds."""
    for errors in ("strict", "surrogatepass"):
        try:
            return line.decode("utf-8", errors)
        except UnicodeDecodeError:
            continue
    return line.decode("utf-8", "surrogateescape")


def _parse_slowly(line: bytes, max_nesting: int) -> Any:
    if _nests_deeper(line, max_nesting):
        raise _too_deep(max_nesting)
    line = line.removeprefix(codecs.BOM_UTF8)  # where files with a mark each were joined
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
        raise Rejected("too_large", "nested too deep") from error


def _decoder(is_strict: bool = True) -> json.JSONDecoder:
    return json.JSONDecoder(
        strict=is_strict,
        object_pairs_hook=_unique_keys,
        parse_constant=_refuse_constant,
        parse_int=_whole_number,
        parse_float=_finite_number,
    )


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict of a JSON object's pairs; a key that stands twice is refused, as one of its values would vanish."""
    value = dict(pairs)
    if len(value) != len(pairs):
        (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise Rejected("unparsable", f"the key {key!r} stands twice")
    return value


def _refuse_constant(name: str) -> Any:
    raise Rejected("unparsable", f"{name} is not JSON")


def _whole_number(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise Rejected("unparsable", f"a whole number of {len(digits):,} digits")
    return int(digits)


def _finite_number(digits: str) -> float:
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
