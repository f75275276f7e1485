"""Try the normalizer and the pre-tokenizer of a foreign `tokenizer.json` in a child process with limits.

A regular expression may backtrack for ever or make the library panic; a chain of replacements may grow a text by
millions. Both would end this process without an error message. Pipelines without such parts are not tried.
Only processor time counts, because the child waits on a busy machine.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tunewell.core.cache import DiskCache
from tunewell.core.child import ChildDied, answer, call, limit_resources
from tunewell.core.errors import UserError
from tunewell.core.progress import Progress, ProgressListener

_SECONDS = 5
"""Processor time of the child process."""
_WAIT_SECONDS = 120
_MAX_BYTES = 1 << 30
_MAX_GROWTH = 64
"""Characters per character. Unicode normalisation makes up to 18 of one."""
_VERSION = 2
_MODULE = "tunewell.data.tokenizers.probe"
_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
"""The threads of the library would take address space, which is limited."""


def require_safe(backend: Tokenizer, where: Path) -> None:
    """Raise UserError if the tokenizer crashes, hangs or grows texts; the result is cached by a hash of its parts."""
    parts = {
        name: json.loads(part.__getstate__())
        for name, part in (("normalizer", backend.normalizer), ("pre_tokenizer", backend.pre_tokenizer))
        if part is not None
    }
    cache, key = DiskCache("tokenizers"), [_VERSION, parts]
    if cache.read(key) is not None:
        return
    if not (problem := _try(parts)):  # a problem is not stored, because the machine may have caused it
        cache.write(key, {"problem": ""})
    else:
        raise UserError(
            f"`tokenizer.json` cannot be used: {problem}",
            where=str(where),
            fix="use the tokenizer of the original model; this file is damaged or was made to crash programs",
        )


def _try(parts: dict[str, Any]) -> str:
    """Return what goes wrong in a child process, or an empty text."""
    empty: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
    }
    request = [json.dumps(empty | parts), _texts(parts)]
    slow = f"its regular expression takes more than {_SECONDS} s for a short text"
    begun: list[Progress] = []
    try:
        return call(_MODULE, request, progress=begun.append, seconds=_WAIT_SECONDS, environment=_ONE_THREAD)
    except TimeoutError:
        return slow
    except ChildDied as died:
        if died.ended.signal_name == "SIGXCPU":
            return slow
        if not begun:  # the child could not start: the tokenizer is not to blame
            return ""
        # With RUST_BACKTRACE, a note and the stack follow the message.
        lines = [line for line in died.ended.err.strip().splitlines() if not line.startswith(("note:", " "))]
        return f"encoding a short text ends the program ({(lines or ['no message'])[-1][:120]})"


def _encode(request: Any, progress: ProgressListener) -> str:
    """Normalise and split the texts, in the child process. Return what goes wrong, or an empty text."""
    source, texts = request
    progress(Progress("encoding"))
    tokenizer = Tokenizer.from_str(source)
    for text in texts:
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


if __name__ == "__main__":
    limit_resources(memory_bytes=_MAX_BYTES, processor_seconds=_SECONDS)
    answer(_encode)
