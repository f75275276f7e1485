"""Read tensors from safetensors files, name them as llama.cpp does, and encode them for a GGUF file."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from tunewell.core.errors import UserError
from tunewell.core.optional import import_optional
from tunewell.export.gguf.architecture import Settings

_SHOWN = 5
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Buffers that old checkpoints carry and every library computes anew.
_COMPUTED = re.compile(r"\.rotary_emb\.inv_freq$|\.(masked_bias|attn\.bias)$")


@dataclass(frozen=True)
class NamedTensor:
    """One tensor of the file to be: what it is made of, and how."""

    name: str
    """The name in llama.cpp."""
    sources: tuple[str, ...]
    """The name in the model's files."""
    shape: tuple[int, ...]
    is_stacked: bool = False
    """The sources, one of each head, become the rows of one tensor."""
    is_turned: bool = False
    """Rows of queries and keys: rotary pairs become neighbours."""
    is_shifted: bool = False
    """A norm that is stored with 1 added."""


class WeightFiles:
    """The tensors of a model folder, each read when it is asked for."""

    def __init__(self, folder: Path, renames: dict[str, str]) -> None:
        self.folder = folder
        self._opened: dict[Path, Any] = {}
        self._places: dict[str, tuple[Path, str]] = {}
        for path in _files(folder):
            for name in self._open(path).keys():  # noqa: SIM118  the handle is no dictionary
                own = name
                for pattern, replacement in renames.items():
                    own = re.sub(pattern, replacement, own)
                self._places[own] = (path, name)

    def names(self) -> set[str]:
        """List the tensors as transformers calls them in a text model."""
        return set(self._places)

    def drop(self, names: set[str]) -> None:
        """Forget tensors that are no part of the model."""
        for name in names:
            del self._places[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Give a tensor's shape without reading it."""
        path, own = self._places[name]
        return tuple(self._open(path).get_slice(own).get_shape())

    def read(self, name: str) -> Tensor:
        """Read one tensor as it is stored; the pages of its file come in as they are touched."""
        path, own = self._places[name]
        return self._open(path).get_tensor(own)

    def _open(self, path: Path) -> Any:
        if path not in self._opened:
            try:
                self._opened[path] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise UserError(f"`{path.name}` cannot be read: {error}", where=str(path)) from None
        return self._opened[path]


def open_weights(folder: Path, settings: Settings) -> WeightFiles:
    """Open a folder's weights and check that they are the model's, all of them and none besides."""
    weights = WeightFiles(folder, settings.part.get("names", {}))
    if pattern := settings.part.get("left_out"):
        weights.drop({name for name in weights.names() if re.search(pattern, name)})
    weights.drop({name for name in weights.names() if _COMPUTED.search(name)})
    expected = _expected_shapes(settings)
    is_tied = bool(settings.values["tie_word_embeddings"])
    if is_tied and _HEAD in weights.names():
        if not torch.equal(weights.read(_HEAD), weights.read(_EMBEDDING)):
            raise UserError(
                "config.json says that embedding and head are tied, but the files contain two different tensors",
                where=str(folder),
                fix="set `tie_word_embeddings` to false in config.json if the head was trained separately",
            )
        weights.drop({_HEAD})
    if is_tied:
        expected.pop(_HEAD, None)
    found = {name: weights.shape(name) for name in weights.names()}
    kinds = {
        "missing": sorted(expected.keys() - found.keys()),
        "unknown": sorted(found.keys() - expected.keys()),
        "of another shape": sorted(name for name in found.keys() & expected.keys() if found[name] != expected[name]),
    }
    problems = [f"{len(names):,} {word} ({', '.join(names[:_SHOWN])})" for word, names in kinds.items() if names]
    if problems:
        raise UserError(
            f"the tensors do not match config.json: {'; '.join(problems)}",
            where=str(folder),
            fix="export the model again: its files are incomplete or from different models",
        )
    return weights


def name_tensors(weights: WeightFiles, settings: Settings) -> list[NamedTensor]:
    """Name every tensor as llama.cpp does, in the order of its layers."""
    gguf = import_optional("gguf", extra="export", purpose="writing a GGUF file")
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == settings.gguf_name)
    known = gguf.get_tensor_name_map(number, settings.values["num_hidden_layers"])
    stacked = re.compile(settings.spec.get("stacked", r"(?!)"))
    groups: dict[str, list[str]] = {}
    for name in sorted(weights.names(), key=_natural):
        match = stacked.match(name)
        groups.setdefault(f"{match[1]}.weight" if match else name, []).append(name)
    if settings.spec.get("needs_head") and _HEAD not in groups:
        groups[_HEAD] = [_EMBEDDING]
    tensors = [_named(name, sources, weights, settings, known) for name, sources in groups.items()]
    return sorted(tensors, key=lambda tensor: (tensor.name.startswith("blk."), _natural(tensor.name)))


def _named(name: str, sources: list[str], weights: WeightFiles, settings: Settings, known: Any) -> NamedTensor:
    new = known.get_name(name, try_suffixes=(".weight", ".bias"))
    if new is None:
        raise UserError(
            f"llama.cpp has no name for the tensor `{name}` of a `{settings.model_type}` model",
            fix="export the model as `adapter` or `merged`",
        )
    shape = weights.shape(sources[0])
    is_stacked = re.match(settings.spec.get("stacked", r"(?!)"), sources[0]) is not None
    return NamedTensor(
        name=new,
        sources=tuple(sources),
        shape=(len(sources), *shape) if is_stacked else shape,
        is_stacked=is_stacked,
        is_turned=bool(settings.spec.get("turned")) and re.search(r"\.[qk]_proj\.(weight|bias)$", name) is not None,
        is_shifted=bool(settings.spec.get("norm_plus_one")) and name.endswith("norm.weight"),
    )


def load(tensor: NamedTensor, weights: WeightFiles, head_dim: int) -> Tensor:
    """Read a tensor and bring it into llama.cpp's order.

    halves  a0 a1 a2 b0 b1 b2        neighbours  a0 b0 a1 b1 a2 b2
    """
    parts = [weights.read(name) for name in tensor.sources]
    whole = torch.stack(parts) if tensor.is_stacked else parts[0]
    if tensor.is_turned:
        whole = whole.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2).contiguous()
    return whole.float() + 1 if tensor.is_shifted else whole


def _expected_shapes(settings: Settings) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings.config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        paths = [folder / name for name in names]
    else:
        paths = [folder / "model.safetensors"]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise UserError(
            f"there is no `{missing[0]}`" + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""),
            where=str(folder),
            fix="give the folder of a whole model in safetensors; merge an adapter first",
        )
    return paths


def _natural(name: str) -> list[tuple[int, str]]:
    """Order `layers.10` behind `layers.9`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


# Encode tensors, some rows at a time.

GgufKind = Literal["f32", "f16", "bf16", "q8_0"]

# The largest number of half precision, and how many steps Q8_0 has from 0 to the largest of a block.
_LARGEST_HALF, _STEPS = 65504.0, 127
# Numbers brought into another form at once: 4 MiB in fp32.
_NUMBERS_AT_ONCE = 1 << 20


def storage_type(name: str, shape: tuple[int, ...], kind: GgufKind) -> Any:
    """Return a tensor's type: norms and vectors stay F32; rows that are no multiple of a block become F16."""
    gguf = import_optional("gguf", extra="export", purpose="writing a GGUF file")
    types = gguf.GGMLQuantizationType
    if len(shape) < 2 or name.endswith("_norm.weight") or not name.endswith(".weight"):
        return types.F32
    wanted = types[kind.upper()]
    block, _ = gguf.GGML_QUANT_SIZES[wanted]
    return wanted if shape[-1] % block == 0 else types.F16


def num_bytes(shape: tuple[int, ...], kind: Any) -> int:
    """Count the bytes of a tensor in a file."""
    gguf = import_optional("gguf", extra="export", purpose="writing a GGUF file")
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return math.prod(shape) // block * size


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that is made when it is written: the part of an array that a GGUFWriter asks for."""

    source: str
    """Its name in the model's files."""
    shape: tuple[int, ...]
    kind: Any
    nbytes: int
    load: Callable[[], Tensor]

    def tofile(self, file: IO[bytes]) -> None:
        """Write the tensor, some rows at a time; raise UserError where a number is not finite or does not fit."""
        from gguf.quants import quantize

        whole = self.load()
        rows = whole.reshape(-1, whole.shape[-1])
        step = max(1, _NUMBERS_AT_ONCE // max(1, rows.shape[1]))
        written = 0
        for start in range(0, len(rows), step):
            part = rows[start : start + step].to(torch.float32).numpy()
            self._check(part)
            # Blocks stand for themselves and rows are whole blocks, so one long row saves going through 16 at a time.
            written += file.write(quantize(part.reshape(1, -1), self.kind).tobytes())
        assert written == self.nbytes, f"{self.source}: {written} bytes, not {self.nbytes}"

    def _check(self, part: np.ndarray) -> None:
        largest = float(np.abs(part).max(initial=0.0))
        if not math.isfinite(largest):
            raise UserError(
                f"the tensor `{self.source}` is not finite: it contains NaN or infinity",
                fix="the model is broken: export an earlier checkpoint",
            )
        limit = {"F16": _LARGEST_HALF, "Q8_0": _LARGEST_HALF * _STEPS}.get(self.kind.name, math.inf)
        if largest > limit:
            raise UserError(
                f"the tensor `{self.source}` contains {largest:,.0f}, beyond the {limit:,.0f} of {self.kind.name}",
                fix="export it as bf16 or f32",
            )
