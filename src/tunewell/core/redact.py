"""Redact secrets from all output: known formats, values after secret names, and values of secret environment variables.

Every screen, JSON, log, error and report passes through `redact`. The known formats, and those of personal data, are
also searched for in training rows.
"""

import os
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast

REDACTED = "[redacted]"

T = TypeVar("T")

_MIN_CHARS = 8
"""Minimum length of a variable's value. Shorter values (`1`, `false`, `no`) occur everywhere in the files of a run."""
_MIN_DISTINCT_CHARS = 4
"""Minimum number of distinct characters in a variable's value: `00000000` occurs in many numbers and hashes."""
_MIN_TOKEN_CHARS = 15

_PLACEHOLDER = re.compile(r"(?i)your|example|placeholder|x{4}|\*{3}|[<>{}$\[\]()]|\.\.\.")
_RESERVED_DOMAIN = re.compile(r"(?i)@(?:[\w-]+\.)*(?:example(?:\.\w+)?|test|invalid|localhost|domain\.com|email\.com)$")
_SECRET_NAME = re.compile(
    r"TOKEN(?!IZ)|SECRET|PASSW(?:OR)?D|PASSPHRASE|CREDENTIAL|APIKEY|(?:^|_)KEYS?(?:_|$)", re.IGNORECASE
)
_PLACE_NAME = re.compile(r"_(?:FILE|PATH|DIR|HOME)$", re.IGNORECASE)


def redact(value: T) -> T:
    """Replace every secret in a text, or in nested lists and dictionaries, with `[redacted]`."""
    return _redact(value, _values_to_hide())


def _redact(value: object, hidden: tuple[str, ...]) -> Any:
    if isinstance(value, str):
        return _redact_text(value, hidden)
    if isinstance(value, dict):
        items = cast(dict[object, object], value).items()
        return {_redact_key(key, hidden): _redact_entry(key, entry, hidden) for key, entry in items}
    if isinstance(value, list | tuple):
        entries = cast(list[object] | tuple[object, ...], value)
        return type(entries)([_redact(entry, hidden) for entry in entries])
    return value


def _redact_text(text: str, hidden: tuple[str, ...]) -> str:
    if not _may_hold_secret(text, hidden):
        return text
    # Lines without a mark are not searched. A key block has several lines, and so may a variable's value.
    has_block = "-----BEGIN" in text or any("\n" in value for value in hidden)
    lines = [text] if has_block else text.splitlines(keepends=True)
    for pattern in (_pattern(hidden), _compile(_knowledge()["commands"])):
        lines = [pattern.sub(_keep_prefix, line) if _may_hold_secret(line, hidden) else line for line in lines]
    return "".join(lines)


def _may_hold_secret(text: str, hidden: tuple[str, ...]) -> bool:
    folded = text.lower()
    return any(mark in folded for mark in _knowledge()["marks"]) or any(value in text for value in hidden)


def _redact_key(key: Any, hidden: tuple[str, ...]) -> Any:
    # Skip short texts: every event of a run has the same dozen short keys, and no token is that short.
    return key if isinstance(key, str) and len(key) < _MIN_TOKEN_CHARS else _redact(key, hidden)


def _redact_entry(key: Any, entry: Any, hidden: tuple[str, ...]) -> Any:
    if isinstance(entry, str) and entry and isinstance(key, str) and _compile(_knowledge()["keys"]).search(key):
        return REDACTED
    return _redact(entry, hidden)


def _keep_prefix(found: re.Match[str]) -> str:
    return (found[found.lastgroup] if found.lastgroup else "") + REDACTED


def _values_to_hide() -> tuple[str, ...]:
    # The environment is read at every call, because a program may set its token after the first event.
    hidden = {value for name, value in os.environ.items() if _names_a_secret(name) and _can_be_secret(value)}
    return tuple(sorted(hidden, key=lambda value: (-len(value), value)))


@lru_cache(maxsize=4096)
def _names_a_secret(variable: str) -> bool:
    return bool(_SECRET_NAME.search(variable)) and not _PLACE_NAME.search(variable)


def _can_be_secret(value: str) -> bool:
    return len(value) >= _MIN_CHARS and len(set(value)) >= _MIN_DISTINCT_CHARS


@lru_cache(maxsize=1)
def _knowledge() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


@lru_cache(maxsize=64)
def _compile(pattern: str) -> re.Pattern[str]:
    for name, part in _knowledge()["parts"].items():
        pattern = pattern.replace(f"<{name}>", part)
    return re.compile(pattern, re.VERBOSE)


@lru_cache(maxsize=8)
def _pattern(values: tuple[str, ...]) -> re.Pattern[str]:
    kinds = _knowledge()["secrets"].items()
    shapes = [own["shape"] for kind, own in kinds if kind != "password"]  # in output, any value of a name
    return _compile("|".join([*map(_exactly, values), _knowledge()["output"], *shapes]))


def _exactly(value: str) -> str:
    """Return a pattern for a variable's value. A value that has only letters, like `postgres`, must be a whole word."""
    escaped = re.escape(value)
    if not value.isalpha():
        return escaped
    # The user before the host of a URL counts as a word; a part of a path does not: `/srv/postgres/model` must stay.
    return rf"(?<=//){escaped}(?=@)|(?<![\w/\\.-]){escaped}(?![\w/-]|\.\w|\\(?!\"))"


def possible_secrets() -> list[str]:
    """Return patterns of which one matches every text with a secret or personal data."""
    return ["|".join(parts) for parts in _knowledge()["possible"]]


def hide_secrets(text: str, found: Counter[str]) -> str:
    """Count the secrets and personal data in a text by kind; return the text with each replaced by `[kind]`."""
    for kind, pattern in _possible_kinds(text):

        def hide(match: re.Match[str], kind: str = kind) -> str:
            start = _secret_start(match)
            if not _is_plausible(kind, match.string[start : match.end()]):
                return match[0]
            found[kind] += 1
            return f"{match.string[match.start() : start]}[{kind}]"

        text = pattern.sub(hide, text)
    return text


def secret_spans(text: str) -> list[tuple[int, int, str]]:
    """Return the start, end and kind of each secret in a text. Spans of different kinds may overlap."""
    return [
        (start, match.end(), kind)
        for kind, pattern in _possible_kinds(text)
        for match in pattern.finditer(text)
        if _is_plausible(kind, text[(start := _secret_start(match)) : match.end()])
    ]


def _possible_kinds(text: str) -> Iterator[tuple[str, re.Pattern[str]]]:
    folded = text.lower()
    for kind, own in (_knowledge()["secrets"] | _knowledge()["personal"]).items():
        if any(hint in folded for hint in own.get("hints", [""])):
            yield kind, _compile(own["shape"])


def _secret_start(match: re.Match[str]) -> int:
    """Return where the secret begins, after the text that only precedes it."""
    return match.end(match.lastgroup) if match.lastgroup else match.start()


def _is_plausible(kind: str, value: str) -> bool:
    """Return False for placeholders, and for numbers whose check digits are wrong."""
    digits = [int(character) for character in value if character.isdigit()]
    if kind == "password":
        return bool(digits) and not value.isdigit() and not _PLACEHOLDER.search(value)
    if kind == "e-mail address":
        return not _RESERVED_DOMAIN.search(value)
    if kind == "phone number":
        return 7 <= len(digits) <= 15 and (value[0] != "+" or len(digits) >= 9)
    if kind == "card number":
        doubled = [digit * 2 - 9 * (digit > 4) for digit in digits[-2::-2]]
        return 13 <= len(digits) <= 19 and sum(doubled + digits[-1::-2]) % 10 == 0
    if kind == "bank account":
        account = value.replace(" ", "")
        return int("".join(str(int(letter, 36)) for letter in account[4:] + account[:4])) % 97 == 1
    return True
