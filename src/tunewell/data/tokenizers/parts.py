"""Shared parts of the tokenizer readers: steps, marker detection, byte alphabet and data tables."""

import json
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from tunewell.core.files import read_data

# User-defined symbols can also be turn markers. Text of a row must not become a turn marker.
_MARKER = re.compile(r"<\|[^|<>\s]+\|>|\[/?INST\]|<(?:start|end)_of_turn>")


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
    return read_data(__file__, f"{name}.json")


def steps_of(part: Any) -> list[dict[str, Any]]:
    """Return the settings of a normalizer or a pre-tokenizer, step by step; an empty list for None."""
    if part is None:
        return []
    state = json.loads(part.__getstate__())
    return state.get("normalizers", state.get("pretokenizers", [state]))


def byte_alphabet() -> dict[int, str]:
    """Return the byte-level BPE character of each byte: the same character if printable, else one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}
