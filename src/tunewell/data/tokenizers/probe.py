"""Try the normalizer and the pre-tokenizer of a foreign `tokenizer.json` in a child process with limits.

A regular expression may backtrack for ever or make the library panic; a chain of replacements may grow a text by
millions. Both would end this process without an error message. Pipelines without such parts are not tried.
Only processor time counts, because the child waits on a busy machine.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tunewell.core.cache import DiskCache
from tunewell.core.errors import UserError

_SECONDS = 5
"""Processor time of the child process."""
_WAIT_SECONDS = 120
_MAX_BYTES = 1 << 30
_MAX_GROWTH = 64
"""Characters per character. Unicode normalisation makes up to 18 of one."""
_VERSION = 2
_PROBE = """
import json, sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
except (ImportError, ValueError, OSError):
    pass
from tokenizers import Tokenizer
tokenizer, texts = json.load(sys.stdin)
print("ready", flush=True)
tokenizer = Tokenizer.from_str(tokenizer)
for text in texts:
    grown = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
    if len(grown) > MAX_GROWTH * len(text):
        sys.exit(f"a text of {len(text)} characters grows to {len(grown)}")
    if tokenizer.pre_tokenizer:
        tokenizer.pre_tokenizer.pre_tokenize_str(grown)
"""


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
    request = json.dumps([json.dumps(empty | parts), _texts(parts)])
    limits = {"MAX_BYTES": _MAX_BYTES, "MAX_GROWTH": _MAX_GROWTH, "SECONDS": _SECONDS}
    code = _PROBE
    for name, limit in limits.items():
        code = code.replace(name, str(limit))
    slow = f"its regular expression takes more than {_SECONDS} s for a short text"
    try:
        # The threads of the library would take address space, which is limited.
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=request, capture_output=True, text=True, timeout=_WAIT_SECONDS, check=False, env=environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return slow
    if done.returncode < 0 and -done.returncode == getattr(signal, "SIGXCPU", None):
        return slow
    if done.returncode == 0 or "ready" not in done.stdout:  # the child could not start: the tokenizer is not to blame
        return ""
    # With RUST_BACKTRACE, a note and the stack follow the message.
    lines = [line for line in done.stderr.strip().splitlines() if not line.startswith(("note:", " "))]
    last = (lines or ["no message"])[-1]
    if "characters grows" in last:
        return last
    return f"encoding a short text ends the program ({last[:120]})"


def _texts(parts: dict[str, Any]) -> list[str]:
    """Return texts that make bad patterns slow: runs of each character that the parts mention, and ordinary text."""
    mentioned = sorted({character for character in json.dumps(parts, ensure_ascii=False) if character.isalnum()})
    runs = [character * 300 + ending for character in [*mentioned[:100], " ", "\n", "é", "."] for ending in ("", "!")]
    plain = "The 3 quick brown foxes, it's said, jumped over 12,345 lazy dogs!\n\n  Straße naïve 日本語 🙂\t" * 20
    return [plain, *runs]
