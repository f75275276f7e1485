"""What every kind of tokenizer file is turned into before it becomes a LoadedTokenizer."""

import json
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from tokenizers import Tokenizer, processors

# A symbol the model's author defined as text may still be a turn marker; such a one must not be spelled by a row.
_MARKER = re.compile(r"<\|[^|<>\s]+\|>|\[/?INST\]|<(?:start|end)_of_turn>")


@dataclass(frozen=True)
class TokenizerParts:
    """A tokenizer with what the `tokenizers` library does not keep."""

    backend: Tokenizer
    special_tokens: dict[str, str]
    chat_template: str | None
    adds_bos: bool
    max_length: int | None = None
    """What the files call `model_max_length`, where it is a length and not a stand-in for "none"."""


def looks_like_marker(text: str) -> bool:
    """Tell a turn marker such as `<|im_start|>` from an ordinary user-defined symbol such as four spaces."""
    return _MARKER.fullmatch(text) is not None


def prepend_bos(backend: Tokenizer, bos: str) -> None:
    """Make plain text start with the bos token whenever special tokens are asked for."""
    bos_id = backend.token_to_id(bos)
    backend.post_processor = processors.TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", f"{bos}:1", "$B:1"], special_tokens=[(bos, bos_id)]
    )


@cache
def load_table(name: str) -> dict[str, Any]:
    """Read one of the tables of facts that lie beside this module."""
    folder = files("tunewell.data.tokenizers")
    return json.loads(folder.joinpath(f"{name}.json").read_text(encoding="utf-8"))
