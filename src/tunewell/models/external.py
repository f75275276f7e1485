"""Read checkpoints of other training code: find the weights, rename them, and check that none is missing."""

import pickle  # noqa: TID251  only the class of the error that torch raises; nothing is unpickled by us
import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from tunewell.core.errors import UserError
from tunewell.model_files.weights import KeyMap, key_map_path
from tunewell.models.attention import head_size
from tunewell.models.pretrained import first_names

# Keys under which training scripts store the weights next to the optimizer state, most common first.
_WEIGHT_ENTRIES = ("model", "state_dict", "model_state_dict", "module", "model_state")
# Prefixes added by torch.compile and by torch's data parallelism.
_WRAPPERS = ("_orig_mod.", "module.")


def read_external_weights(path: Path, key_map: KeyMap, *, allow_pickle: bool) -> dict[str, Tensor]:
    """Read the weights of a `.pt`, `.pth`, `.bin` or `.safetensors` file, renamed to transformers' names.

    A file written by `torch.save` (pickle) is read only if `allow_pickle` is set. Only tensors are loaded; code in the
    file is never run.
    """
    raw = _read_safetensors(path) if path.suffix == ".safetensors" else _unpickle(path, allow_pickle)
    weights = _strip_wrappers(_weights_in(raw, key_map, path))
    renamed: dict[str, Tensor] = {}
    for key, tensor in weights.items():
        name = key_map.name_of(key)
        if name is None:
            continue
        if name in renamed:
            raise UserError(f"two weights of the checkpoint are renamed to `{name}`", where=str(path), fix=_fix(path))
        renamed[name] = tensor
    return renamed


def fit_weights(weights: dict[str, Tensor], model: PreTrainedModel, path: Path) -> None:
    """Add tied weights, and raise UserError if names or shapes differ from those of the model."""
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for target, origin in model.all_tied_weights_keys.items():
        if origin in weights and not torch.equal(weights.setdefault(target, weights[origin]), weights[origin]):
            raise UserError(f"`{target}` and `{origin}` differ, but the model ties them", where=str(path))
    missing, unknown = sorted(shapes.keys() - weights.keys()), sorted(weights.keys() - shapes.keys())
    wrong_shape = [
        f"{name} {tuple(weights[name].shape)} instead of {tuple(shapes[name])}"
        for name in sorted(shapes.keys() & weights.keys())
        if weights[name].shape != shapes[name]
    ]
    kinds = {"missing": missing, "unknown": unknown, "with another shape": wrong_shape}
    problems = [f"{len(names):,} {kind} ({first_names(names)})" for kind, names in kinds.items() if names]
    if problems:
        raise UserError(
            f"the weights of `{path.name}` do not fit the model: {'; '.join(problems)}",
            where=str(path),
            fix=_fix(path),
        )


def split_rotary_pairs(weights: dict[str, Tensor], config: PreTrainedConfig) -> dict[str, Tensor]:
    """Reorder the rows of queries and keys from interleaved rotary pairs to halves, as in transformers.

    interleaved  a0 b0 a1 b1 a2 b2       halves  a0 a1 a2 b0 b1 b2
    """
    size = head_size(config)
    return {
        name: tensor.unflatten(0, (-1, size // 2, 2)).transpose(1, 2).flatten(0, 2).contiguous()
        if re.search(r"\.[qk]_proj\.(weight|bias)$", name)
        else tensor
        for name, tensor in weights.items()
    }


def _unpickle(path: Path, allow_pickle: bool) -> Any:
    if not allow_pickle:
        raise UserError(
            f"`{path.name}` was written by `torch.save`, a format that can contain code (pickle)",
            where=str(path),
            fix="convert the file to safetensors, or add `--allow-pickle`, which loads only tensors",
        )
    try:
        # Files from before 2020 are not zip archives and cannot be memory-mapped.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        why = str(error).strip().splitlines()
        raise UserError(
            f"`{path.name}` cannot be read without running code in it, or is damaged: {why[0] if why else 'empty'}",
            where=str(path),
            fix="save only the model's `state_dict()` in the code that writes the file",
        ) from None


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"`{path.name}` cannot be read: {error}", where=str(path)) from None


def _weights_in(raw: Any, key_map: KeyMap, path: Path) -> dict[str, Tensor]:
    entries = [key_map.weights] if key_map.weights else [None, *_WEIGHT_ENTRIES]
    for entry in entries:
        found = raw if entry is None else raw.get(entry) if isinstance(raw, dict) else None
        if isinstance(found, dict) and found and all(isinstance(value, Tensor) for value in found.values()):
            return {str(key): value for key, value in found.items()}
    inside = ", ".join(f"`{key}`" for key in list(raw)[:10]) if isinstance(raw, dict) else type(raw).__name__
    named = f" under `{key_map.weights}`" if key_map.weights else ""
    raise UserError(
        f"`{path.name}` contains no weights{named}; the file contains {inside}",
        where=str(path),
        fix=f"set `weights` in `{key_map_path(path).name}` to the key that contains the weights",
    )


def _strip_wrappers(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    for prefix in _WRAPPERS:
        if all(key.startswith(prefix) for key in weights):
            weights = {key.removeprefix(prefix): tensor for key, tensor in weights.items()}
    return weights


def _fix(path: Path) -> str:
    return f"rename or drop entries in `{key_map_path(path).name}` next to the checkpoint (`rename`, `drop`)"
