"""Take secrets out of whatever is written down: tokens by their shape, and the values of secret-looking variables."""

import os
import re
from functools import lru_cache
from typing import Any, TypeVar

REDACTED = "[redacted]"

T = TypeVar("T")

_LEAST_CHARS = 8
"""Shorter values of variables (`1`, `false`, `no`) are everywhere in a run's files."""
_LEAST_KINDS = 4
"""Different characters a variable's value must have: `00000000` lies in many numbers and hashes."""
_LEAST_TOKEN_CHARS = 15

# Each alternative starts with a literal or stops where the next one could start, so that no text takes more than linear
# time. A named group is what stays in front of the secret.
_SHAPES = r"""
    hf_[A-Za-z0-9]{16,}                                             # Hugging Face
  | (?<![A-Za-z0-9])sk-[A-Za-z0-9_-]{16,}                           # OpenAI, Anthropic and those that followed
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
    """Replace every secret in a text, or in the texts of nested lists and dictionaries, by `[redacted]`.

    Known shapes of tokens, passwords in addresses, values under keys like `password`, and whatever a variable of the
    environment holds whose name says token, key, secret or password. Everything that is no text stays the same object.
    """
    return _redact(value, None)


def _redact(value: Any, secrets: re.Pattern[str] | None) -> Any:
    if isinstance(value, str):
        if len(value) < _LEAST_CHARS:
            return value
        return (secrets or _pattern(_values_to_hide())).sub(_keep_front, value)
    if isinstance(value, dict):
        secrets = secrets or _pattern(_values_to_hide())
        return {_redact_key(key, secrets): _redact_entry(key, entry, secrets) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        secrets = secrets or _pattern(_values_to_hide())
        return type(value)([_redact(entry, secrets) for entry in value])
    return value


def _redact_key(key: Any, secrets: re.Pattern[str]) -> Any:
    # Every event of a run has the same dozen keys, and no token is as short as a name.
    return key if isinstance(key, str) and len(key) < _LEAST_TOKEN_CHARS else _redact(key, secrets)


def _redact_entry(key: Any, entry: Any, secrets: re.Pattern[str]) -> Any:
    if isinstance(entry, str) and entry and isinstance(key, str) and _SECRET_KEY.fullmatch(key):
        return REDACTED
    return _redact(entry, secrets)


def _keep_front(found: re.Match[str]) -> str:
    return (found[found.lastgroup] if found.lastgroup else "") + REDACTED


def _values_to_hide() -> tuple[str, ...]:
    # Read anew each time: a program may set its token after its first event.
    hidden = {value for name, value in os.environ.items() if _names_a_secret(name) and _can_be_secret(value)}
    return tuple(sorted(hidden, key=lambda value: (-len(value), value)))


@lru_cache(maxsize=4096)
def _names_a_secret(variable: str) -> bool:
    return bool(_SECRET_NAME.search(variable)) and not _PLACE_NAME.search(variable)


def _can_be_secret(value: str) -> bool:
    return len(value) >= _LEAST_CHARS and len(set(value)) >= _LEAST_KINDS


@lru_cache(maxsize=8)
def _pattern(values: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join([*map(_exactly, values), _SHAPES]), re.VERBOSE)


def _exactly(value: str) -> str:
    """Match a variable's value anywhere; one of letters alone, like `postgres`, only where it is a word.

    A part of a path or of a file's name is none: `/srv/postgres/model` must still be found by whoever reads it. What
    stands before the host of an address is one, and so is what JSON within JSON has in quotes.
    """
    escaped = re.escape(value)
    if not value.isalpha():
        return escaped
    return rf"(?<=//){escaped}(?=@)|(?<![\w/\\.-]){escaped}(?![\w/-]|\.\w|\\(?!\"))"
