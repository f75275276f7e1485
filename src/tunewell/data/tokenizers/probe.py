"""Try the normalizer and the pre-tokenizer of a foreign `tokenizer.json` in a child process with limits.

A regular expression may backtrack for ever or make the library panic; a chain of replacements may grow a text by
millions. Pipelines without such parts are not tried.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tunewell.core.errors import UserError
from tunewell.data.trial import find_problem

_SECONDS = 5
"""Processor time of the child process."""
_MAX_GROWTH = 64
"""Characters per character. Unicode normalisation makes up to 18 of one."""


def require_safe(backend: Tokenizer, where: Path) -> None:
    """Raise UserError if the tokenizer crashes, hangs or grows texts."""
    parts = {
        name: json.loads(part.__getstate__())
        for name, part in (("normalizer", backend.normalizer), ("pre_tokenizer", backend.pre_tokenizer))
        if part is not None
    }
    if problem := find_problem(f"{__name__}:find_crash", [parts], doing="encoding", seconds=_SECONDS):
        raise UserError(
            f"`tokenizer.json` cannot be used: {problem}",
            where=str(where),
            fix="use the tokenizer of the original model; this file is damaged or was made to crash programs",
        )


def find_crash(parts: dict[str, Any]) -> str:
    """Normalise and split texts, in the child process. Return what goes wrong, or an empty text."""
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    tokenizer = Tokenizer.from_str(json.dumps({"version": "1.0", "added_tokens": [], "model": model} | parts))
    for text in _texts(parts):
        grown = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
        if len(grown) > _MAX_GROWTH * len(text):
            return f"a text of {len(text)} characters grows to {len(grown)}"
        if tokenizer.pre_tokenizer:
            tokenizer.pre_tokenizer.pre_tokenize_str(grown)
    return ""


def _texts(parts: dict[str, Any]) -> list[str]:
    """Return texts that make bad patterns slow: runs of each character that the parts mention, and ordinary text."""
    mentioned = sorted({character for character in json.dumps(parts, ensure_ascii=False) if character.isalnum()})
    runs = [character * 300 + ending for character in [*mentioned[:100], " ", "\n", "é", "."] for ending in ("", "!")]
    plain = "The 3 quick brown foxes, it's said, jumped over 12,345 lazy dogs!\n\n  Straße naïve 日本語 🙂\t" * 20
    return [plain, *runs]
