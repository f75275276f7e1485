"""Name tensors as llama.cpp does, and encode them for a GGUF file."""

import math
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tunewell.core.errors import UserError
from tunewell.export.gguf.architecture import Settings, rope_tables
from tunewell.export.gguf.quantize import can_quantize, quantize_rows
from tunewell.machine.facts import num_cores

_NOTHING = r"(?!)"
"""A pattern that matches no name."""
_QUERY_OR_KEY = re.compile(r"\.[qk]_proj\.(weight|bias)$")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class NamedTensor:
    """One tensor of a GGUF file, with its source tensors and their conversion."""

    name: str
    """Name in llama.cpp."""
    sources: tuple[str, ...]
    """Names in transformers."""
    shape: tuple[int, ...]
    is_stacked: bool = False
    """Whether the sources, one for each head, become the rows of one tensor."""
    is_interleaved: bool = False
    """Whether the rows of queries and keys are reordered so that rotary pairs are adjacent."""
    is_norm_plus_one: bool = False
    """Whether 1 is added to the weights of a norm."""


class Shaped(Protocol):
    """A tensor, or a description of one."""

    @property
    def shape(self) -> tuple[int, ...]: ...


def untied_tensors(tensors: Mapping[str, Tensor], settings: Settings) -> dict[str, Tensor]:
    """Return the tensors without a head that equals the embedding; raise UserError if they should be equal."""
    weights = dict(tensors)
    head = weights.pop(_HEAD, None) if settings.values["tie_word_embeddings"] else None
    if head is not None and not torch.equal(head, weights[_EMBEDDING]):
        raise UserError(
            "config.json declares tied embeddings, but the embedding and the head are different tensors",
            fix="set `tie_word_embeddings` to false in config.json if the head was trained separately",
        )
    return weights


def name_tensors(weights: Mapping[str, Shaped], settings: Settings) -> list[NamedTensor]:
    """Return the tensors of a GGUF file with their names in llama.cpp: the tables of RoPE, then in layer order."""
    import gguf

    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == settings.gguf_name)
    name_map = gguf.get_tensor_name_map(architecture, settings.values["num_hidden_layers"])
    spec = settings.spec
    groups: dict[str, list[str]] = {}
    stacked: set[str] = set()
    for name in sorted(weights, key=_natural_order):
        match = re.match(spec.get("stacked", _NOTHING), name)
        group = f"{match[1]}.weight" if match else name
        groups.setdefault(group, []).append(name)
        stacked |= {group} if match else set()
    if spec.get("needs_head"):
        groups.setdefault(_HEAD, [_EMBEDDING])
    tensors = []
    for name, sources in groups.items():
        gguf_name = name_map.get_name(name, try_suffixes=(".weight", ".bias"))
        if gguf_name is None:
            raise UserError(
                f"llama.cpp has no name for the tensor `{name}` of a `{settings.model_type}` model",
                fix="export the model as `adapter` or `merged`",
            )
        shape = tuple(weights[sources[0]].shape)
        tensors.append(
            NamedTensor(
                name=gguf_name,
                sources=tuple(sources),
                shape=(len(sources), *shape) if name in stacked else shape,
                is_stacked=name in stacked,
                is_interleaved=spec.get("interleaved_rope", False) and _QUERY_OR_KEY.search(name) is not None,
                is_norm_plus_one=spec.get("norm_plus_one", False) and name.endswith("norm.weight"),
            )
        )
    tables = [NamedTensor(name, (name,), tuple(table.shape)) for name, table in rope_tables(settings).items()]
    tensors.sort(key=lambda tensor: (tensor.name.startswith("blk."), _natural_order(tensor.name)))
    return tables + tensors


def load_tensor(tensor: NamedTensor, weights: Mapping[str, Tensor], head_dim: int) -> Tensor:
    """Read a tensor and convert it to llama.cpp's layout.

    Rotary pairs (a, b) of one head:  transformers  a0 a1 a2 b0 b1 b2        llama.cpp  a0 b0 a1 b1 a2 b2
    """
    parts = [weights[name] for name in tensor.sources]
    values = torch.stack(parts) if tensor.is_stacked else parts[0]
    if tensor.is_interleaved:
        values = values.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2).contiguous()
    return values.float() + 1 if tensor.is_norm_plus_one else values


def _natural_order(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders `layers.10` after `layers.9`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


# Encoding.

# The largest fp16 value, and the steps of Q8_0 between 0 and the largest value of a block.
_MAX_FP16, _Q8_STEPS = 65504.0, 127
# Values converted at once: 0.5 MiB in fp32, so that they stay in the cache and most tensors have parts for all threads.
_NUMBERS_AT_ONCE = 1 << 17
_PYTHON_TYPES = frozenset({"F32", "F16", "BF16", "Q8_0"})
"""Types that the `gguf` package can encode; only llama.cpp encodes the others."""


@dataclass(frozen=True)
class LazyTensor:
    """A tensor loaded when GGUFWriter writes it, with the part of the array interface that GGUFWriter needs."""

    source: str
    """Name in transformers, for error messages."""
    shape: tuple[int, ...]
    ggml_type: Any
    load: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """The size in the file."""
        from gguf import quant_shape_to_byte_shape

        return math.prod(quant_shape_to_byte_shape(self.shape, self.ggml_type))

    def tofile(self, file: IO[bytes]) -> None:
        """Encode and write a few rows at a time; raise UserError for a value that is not finite or out of range."""
        from gguf.quants import quantize

        values = self.load()
        rows = values.reshape(-1, values.shape[-1])
        step = max(1, _NUMBERS_AT_ONCE // max(1, rows.shape[1]))
        kind = self.ggml_type.name
        # Both write the same bytes; llama.cpp is several times as fast.
        uses_llama_cpp = kind not in _PYTHON_TYPES or (kind == "Q8_0" and can_quantize())

        def encode(start: int) -> bytes:
            part = np.ascontiguousarray(rows[start : start + step].to(torch.float32).numpy())
            self._require_range(part)
            if uses_llama_cpp:
                return quantize_rows(part, self.ggml_type).tobytes()
            # Rows are whole blocks, so one long row has the same result; `gguf` would process only 16 rows at once.
            return quantize(part.reshape(1, -1), self.ggml_type).tobytes()

        with ThreadPoolExecutor(num_cores()) as pool:
            starts = range(0, len(rows), step)
            parts = pool.map(encode, starts) if uses_llama_cpp else map(encode, starts)
            written = sum(file.write(part) for part in parts)
        assert written == self.nbytes, f"{self.source}: {written} bytes, not {self.nbytes}"

    def _require_range(self, part: np.ndarray) -> None:
        largest = float(np.abs(part).max(initial=0.0))
        if not math.isfinite(largest):
            raise UserError(
                f"the tensor `{self.source}` contains NaN or infinity",
                fix="export an earlier checkpoint",
            )
        limit = {"F16": _MAX_FP16, "Q8_0": _MAX_FP16 * _Q8_STEPS}.get(self.ggml_type.name, math.inf)
        if largest > limit:
            raise UserError(
                f"the tensor `{self.source}` contains {largest:,.0f}; the maximum of {self.ggml_type.name} is "
                f"{limit:,.0f}",
                fix="export the model as bf16 or f32",
            )
