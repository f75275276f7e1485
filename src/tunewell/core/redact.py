"""Redact secrets from all output: tokens with a known prefix or format, and values of secret environment variables."""

import os
import re
from functools import lru_cache
from typing import Any, TypeVar, cast

REDACTED = "[redacted]"

T = TypeVar("T")

_MIN_CHARS = 8
"""Minimum length of a variable's value. Shorter values (`1`, `false`, `no`) occur everywhere in the files of a run."""
_MIN_DISTINCT_CHARS = 4
"""Minimum number of distinct characters in a variable's value: `00000000` occurs in many numbers and hashes."""
_MIN_TOKEN_CHARS = 15

# Each alternative starts with a literal or stops where the next one could start, so that matching takes linear time.
# A named group matches the text before the secret. This text is not redacted.
_SHAPES = r"""
    hf_[A-Za-z0-9]{16,}                                             # Hugging Face
  | (?<![A-Za-z0-9])sk-[A-Za-z0-9_-]{16,}                           # OpenAI, Anthropic and others
  | gh[oprsu]_[A-Za-z0-9]{16,} | github_pat_[A-Za-z0-9_]{16,}       # GitHub
  | glpat-[A-Za-z0-9_-]{16,} | npm_[A-Za-z0-9]{30,} | pypi-[A-Za-z0-9_-]{30,}
  | xox[abeoprs]-[A-Za-z0-9-]{10,} | AIza[A-Za-z0-9_-]{30,}         # Slack, Google
  | (?<![A-Za-z0-9])(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])        # the public half of an AWS key
  | (?P<aws>(?i:secret_?access_?key|aws_?secret(?:_?key)?)["']?\s{0,9}[:=]\s{0,9}["']?)[A-Za-z0-9/+=]{30,}
  | (?P<assigned>(?i:\b(?:password|passwd|passphrase|api_?key|(?:access|auth|hf)_?token|client_?secret))
      ["']?\s{0,9}[:=]\s{0,9}["']?)[^\s"',;&]{8,}
  | (?P<bearer>(?i:\bbearer)[ ]{1,9})(?=\S{0,99}\d|\S{20})[A-Za-z0-9._~+/=-]{8,}
  | (?P<url>[A-Za-z0-9+]://[^\s/?#@:"'<>]*:)[^\s/?#@"'<>]+(?=@)     # user:password@host
  | (?P<query>[?&](?i:x-amz-(?:signature|credential|security-token)|sig|signature|token|key)=)[^\s&"'<>]{8,}
  | (?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]+                      # JSON Web Token
  | (?P<pem>-----BEGIN[ ][A-Z ]{0,20}PRIVATE[ ]KEY-----)[^-]{1,20000}
"""
_SECRET_NAME = re.compile(
    r"TOKEN(?!IZ)|SECRET|PASSW(?:OR)?D|PASSPHRASE|CREDENTIAL|APIKEY|(?:^|_)KEYS?(?:_|$)", re.IGNORECASE
)
_PLACE_NAME = re.compile(r"_(?:FILE|PATH|DIR|HOME)$", re.IGNORECASE)
_SECRET_KEY = re.compile(
    r"password|passwd|passphrase|secret|(?:api|access|secret|private)_?key|(?:access|auth|bearer|hf)_?token|"
    r"client_?secret|secret_?access_?key|aws_?secret_?access_?key",
    re.IGNORECASE,
)


def redact(value: T) -> T:
    """Replace every secret in a text, or in nested lists and dictionaries, with `[redacted]`."""
    return _redact(value, None)


def _redact(value: object, secrets: re.Pattern[str] | None) -> Any:
    if isinstance(value, str):
        if len(value) < _MIN_CHARS:
            return value
        return (secrets or _pattern(_values_to_hide())).sub(_keep_prefix, value)
    if isinstance(value, dict):
        secrets = secrets or _pattern(_values_to_hide())
        items = cast(dict[object, object], value).items()
        return {_redact_key(key, secrets): _redact_entry(key, entry, secrets) for key, entry in items}
    if isinstance(value, list | tuple):
        secrets = secrets or _pattern(_values_to_hide())
        entries = cast(list[object] | tuple[object, ...], value)
        return type(entries)([_redact(entry, secrets) for entry in entries])
    return value


def _redact_key(key: Any, secrets: re.Pattern[str]) -> Any:
    # Skip short texts: every event of a run has the same dozen short keys, and no token is that short.
    return key if isinstance(key, str) and len(key) < _MIN_TOKEN_CHARS else _redact(key, secrets)


def _redact_entry(key: Any, entry: Any, secrets: re.Pattern[str]) -> Any:
    if isinstance(entry, str) and entry and isinstance(key, str) and _SECRET_KEY.fullmatch(key):
        return REDACTED
    return _redact(entry, secrets)


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


@lru_cache(maxsize=8)
def _pattern(values: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join([*map(_exactly, values), _SHAPES]), re.VERBOSE)


def _exactly(value: str) -> str:
    """Return a pattern for a variable's value. A value that has only letters, like `postgres`, must be a whole word."""
    escaped = re.escape(value)
    if not value.isalpha():
        return escaped
    # The user before the host of a URL counts as a word; a part of a path does not: `/srv/postgres/model` must stay.
    return rf"(?<=//){escaped}(?=@)|(?<![\w/\\.-]){escaped}(?![\w/-]|\.\w|\\(?!\"))"
