"""Look at a GGUF file before llama.cpp does: some mistakes in one make it end the whole process."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.gguf import read_metadata, tensor_count

# What llama.cpp asserts rather than reports, as of its version 0.6; found by damaging every field of a file in turn.
_MOST_LAYERS = 512
_BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))


def refuse_deadly(path: Path) -> None:
    """Raise UserError for a file that is damaged, or that llama.cpp would not survive."""
    meta = read_metadata(path)
    for problem in _problems(meta, num_tensors=tensor_count(path)):
        raise UserError(f"`{path.name}` {problem}", where=str(path), fix="convert the model again")


def _problems(meta: dict[str, Any], *, num_tensors: int) -> Iterator[str]:
    """Say what is wrong, each as the end of a sentence that starts with the name of the file."""
    if num_tensors == 0:
        yield "holds no tensors: it is a vocabulary alone"
    family = meta.get("general.architecture")
    layers = meta.get(f"{family}.block_count")
    if isinstance(layers, int) and not 1 <= layers <= _MOST_LAYERS:
        yield f"says that it has {layers:,} layers"
    for key in ("layer_norm_rms_epsilon", "layer_norm_epsilon"):
        epsilon = meta.get(f"{family}.attention.{key}", 0.0)
        if isinstance(epsilon, float) and not epsilon >= 0:
            yield f"has {epsilon} as `{key}`"
    experts, used = (meta.get(f"{family}.expert{part}_count", 0) for part in ("", "_used"))
    if isinstance(experts, int) and isinstance(used, int) and not min(experts, 1) <= used <= experts:
        yield f"uses {used:,} of {experts:,} experts"
    yield from _vocabulary_problems(meta)


def _vocabulary_problems(meta: dict[str, Any]) -> Iterator[str]:
    tokens = meta.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        return
    # As C reads them: up to the first NUL; those of which nothing is left are given names of their own.
    known = Counter(text for token in tokens if (text := str(token).split("\0", 1)[0]))
    twice, num = known.most_common(1)[0] if known else ("", 0)
    if num > 1:
        yield f"lists the token `{twice[:40]}` {num:,} times"
    if meta.get("tokenizer.ggml.model") == "llama" and (missing := _BYTE_TOKENS - known.keys()):
        yield f"has no token for {len(missing):,} of the 256 bytes (`{min(missing)}`): some texts have no tokens"
