"""Shared parts of the tokenizer readers: the common result type, marker detection, byte alphabet and data tables."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

# User-defined symbols can also be turn markers. Text of a row must not become a turn marker.
_MARKER = re.compile(r"<\|[^|<>\s]+\|>|\[/?INST\]|<(?:start|end)_of_turn>")


@dataclass(frozen=True)
class TokenizerParts:
    """A tokenizer with the properties that the `tokenizers` library does not store."""

    backend: Tokenizer
    special_tokens: dict[str, str]
    chat_template: str | None
    adds_bos: bool
    max_length: int | None = None
    """The `model_max_length` of the files, or None if its value is the huge number that means "no limit"."""


def looks_like_marker(text: str) -> bool:
    """Return True if a symbol is a turn marker such as `<|im_start|>`, and not plain text such as four spaces."""
    return _MARKER.fullmatch(text) is not None


def add_tokens(backend: Tokenizer, tokens: Sequence[AddedToken]) -> None:
    """Add tokens to a tokenizer."""
    backend.add_tokens(list(tokens))  # pyright: ignore[reportUnknownMemberType]  the stub says `list`


def prepend_bos(backend: Tokenizer, bos: str) -> None:
    """Make the tokenizer add the bos token when it adds special tokens."""
    bos_id = backend.token_to_id(bos)
    backend.post_processor = processors.TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", f"{bos}:1", "$B:1"], special_tokens=[(bos, bos_id)]
    )


@cache
def load_table(name: str) -> dict[str, Any]:
    """Load one of the JSON tables of this package."""
    folder = files("tunewell.data.tokenizers")
    return json.loads(folder.joinpath(f"{name}.json").read_text(encoding="utf-8"))


def byte_alphabet() -> dict[int, str]:
    """Return the byte-level BPE character of each byte: the same character if printable, else one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}
