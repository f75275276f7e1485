"""PEFT's adapter format: `adapter_config.json`, the layers that it selects, and the tensor names."""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tunewell.core.errors import UserError
from tunewell.core.files import parse_json
from tunewell.models.support import TEXT_PREFIX

_PREFIX, _MODEL = "base_model.model.", "model."
_LAYER = re.compile(r"\.(?:layers|h|blocks|block)\.(\d+)\.")
_EXPERT_NAMES = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
"""In a model with stacked experts, PEFT treats layers with these names as experts."""
_PEFT = parse_json(Path(__file__).with_name("peft.json").read_bytes())
"""`supported`: PEFT settings that change an adapter's output, with the values that our LoRA supports; the first is
the default. Other values of `init_lora_weights` (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) change the base weights when the
adapter is loaded. `written`: settings with the same value in every adapter of ours."""


@dataclass(frozen=True)
class Selection:
    """The trained layers of a model, by path."""

    linears: tuple[str, ...]
    full_modules: tuple[str, ...]
    linear_names: tuple[str, ...]
    """The names that selected `linears`."""
    layers: tuple[int, ...] | None
    full_names: tuple[str, ...]
    """The names that selected `full_modules`."""


def require_supported_settings(config: dict[str, Any], path: Path) -> None:
    """Raise UserError if an adapter uses a PEFT setting that our LoRA does not support."""
    for key, supported in _PEFT["supported"].items():
        if config.get(key, supported[0]) not in supported:
            raise UserError(
                f"the adapter uses `{key}: {config[key]}`, which tunewell does not support",
                where=str(path),
                fix="merge it into its base model with PEFT (`merge_and_unload`), and use the merged model",
            )


def adapter_config(model: PreTrainedModel, selection: Selection, text_prefix: str) -> dict[str, Any]:
    """Return settings for `adapter_config.json` that make PEFT select exactly these layers."""
    names = [name for name, _ in model.named_modules() if name]
    has_experts = bool(stacked_experts(model))
    # PEFT would treat these linear layers as experts if they were listed as targets.
    as_parameters = [name for name in selection.linears if has_experts and last_name(name) in _EXPERT_NAMES]
    plain = [name for name in selection.linears if name not in as_parameters]
    targets = [target for target in selection.linear_names if any(is_named(name, target) for name in plain)]
    layers = selection.layers
    matched = [name for name in names if any(is_named(name, target) for target in targets)]
    matched = [name for name in matched if layers is None or layer_index(name) in layers]
    adapted = {name for name in matched if not is_within(name, selection.full_modules)}
    is_exact = not text_prefix and adapted == set(plain)
    full = _modules_to_save(names, selection, text_prefix)
    parameters = sorted(f"{multimodal_path(name, text_prefix)}.weight" for name in as_parameters)
    return {
        **_PEFT["written"],
        "fan_in_fan_out": any(isinstance(model.get_submodule(name), Conv1D) for name in selection.linears),
        "target_modules": sorted(targets if is_exact else (multimodal_path(name, text_prefix) for name in plain)),
        "layers_to_transform": list(layers) if is_exact and layers is not None else None,
        "modules_to_save": list(full) or None,
        "ensure_weight_tying": bool(full and tied_names(model)),
        **({"target_parameters": parameters} if parameters else {}),
    }


def _modules_to_save(names: Collection[str], selection: Selection, text_prefix: str) -> tuple[str, ...]:
    """Return the shortest names that select exactly the full modules. PEFT matches every path with that ending."""
    last_names = tuple(dict.fromkeys(last_name(name) for name in selection.full_modules))
    for suffixes in () if text_prefix else (selection.full_names, last_names):
        if {name for name in names if name.endswith(suffixes)} == set(selection.full_modules):
            return suffixes
    return tuple(multimodal_path(name, text_prefix) for name in selection.full_modules)


def match_parameters(names: Iterable[str], parameters: Sequence[str], where: str) -> tuple[str, ...]:
    """Return the linear layers listed in `target_parameters`. Raise UserError for other parameters."""
    found = []
    for parameter in parameters:
        matched = [name for name in names if any(is_named(f"{path}.weight", parameter) for path in _paths(name))]
        if not matched:
            raise UserError(
                f"the adapter uses `target_parameters: {parameter}`, which tunewell does not support", where=where
            )
        found += matched
    return tuple(dict.fromkeys(found))


def match_targets(names: Iterable[str], targets: str | Sequence[str]) -> tuple[str, ...]:
    """Return the layers that `target_modules` selects, by their path in the text part or in the multimodal model."""
    if targets == "all-linear":
        return tuple(names)
    if isinstance(targets, str):
        return tuple(name for name in names if any(re.fullmatch(targets, path) for path in _paths(name)))
    return tuple(name for name in names if _is_selected(name, targets))


def match_full_modules(names: Iterable[str], suffixes: Sequence[str], tensors: Collection[str]) -> tuple[str, ...]:
    """Return the modules that `modules_to_save` selects.

    PEFT compares path endings, not whole names. A module that matches only part of a name is included if its weights
    are in the adapter file.
    """
    found = []
    for name in names:
        matched = [suffix for suffix in suffixes if any(path.endswith(suffix) for path in _paths(name))]
        if _is_selected(name, matched) or (
            matched and any(tensor.startswith(f"{_PREFIX}{name}.") for tensor in tensors)
        ):
            found.append(name)
    return tuple(found)


def saved_tables(model: PreTrainedModel, tensors: Collection[str]) -> tuple[str, ...]:
    """Return the paths of the embedding and the head if they are in an adapter file."""
    return tuple(name for name in table_names(model) if f"{_PREFIX}{name}.weight" in tensors)


def table_names(model: PreTrainedModel) -> list[str]:
    """Return the paths of the embedding and the head."""
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    return [name for name, module in model.named_modules() if any(module is table for table in tables)]


def stacked_experts(model: nn.Module) -> dict[str, Tensor]:
    """Return by name the parameters that store the matrices of several experts in one tensor."""
    convolutions = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Conv1d)}
    return {name: tensor for name, tensor in model.named_parameters() if tensor.dim() == 3 and name not in convolutions}


def peft_name(name: str, text_prefix: str = "") -> str:
    """Return PEFT's name for a tensor."""
    return _PREFIX + re.sub(r"\.(lora_[AB])$", r".\1.weight", multimodal_path(name, text_prefix))


def text_part_name(name: str) -> str:
    """Convert PEFT's name of a tensor in a multimodal model to its name in the text part."""
    name = name.replace(".lora_magnitude_vector.weight", ".lora_magnitude_vector")  # before PEFT 0.12
    prefix = _PREFIX + TEXT_PREFIX
    return _PREFIX + _MODEL + name.removeprefix(prefix) if name.startswith(prefix) else name


def multimodal_path(name: str, text_prefix: str) -> str:
    """Convert the path of a module in the text part to its path in the multimodal model."""
    return text_prefix + name.removeprefix(_MODEL) if text_prefix and name.startswith(_MODEL) else name


def _paths(name: str) -> tuple[str, str]:
    """Return the path of a module in the text part and in the multimodal model."""
    return name, multimodal_path(name, TEXT_PREFIX)


def _is_selected(name: str, targets: Iterable[str]) -> bool:
    return any(is_named(path, target) for path in _paths(name) for target in targets)


def is_named(path: str, name: str) -> bool:
    """Return whether a name in `target_modules` selects a path: it equals the path or its last parts."""
    return path == name or path.endswith(f".{name}")


def is_within(path: str, modules: Iterable[str]) -> bool:
    """Return whether a path is one of these modules or is inside one of them."""
    return any(path == module or path.startswith(f"{module}.") for module in modules)


def layer_index(path: str) -> int | None:
    """Return the index of the decoder layer of a module, or None if it is outside the layers."""
    found = _LAYER.search(f".{path}.")
    return int(found[1]) if found else None


def last_name(path: str) -> str:
    """Return the last part of a path."""
    return path.rpartition(".")[2]


def tied_names(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the paths of the embedding and the head if they are tied, otherwise an empty tuple."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or getattr(head, "weight", None) is not getattr(embedding, "weight", 0):
        return ()
    names = {module: name for name, module in model.named_modules()}
    return names[embedding], names[head]


def suggest_names(expected: Collection[str], found: Collection[str]) -> str:
    """Return the fix for an adapter with other names: a prefix to remove, a part to rename, or the right base model."""
    for name in found:
        known = next((own for own in expected if name != own and name.endswith(own)), None)
        if known is not None:
            prefix = name.removesuffix(known)
            return (
                f"remove the prefix `{prefix}` from the names in the file; a wrapper of the model added it when saving"
            )
    if (renamed := _find_renaming(expected, found)) is not None:
        return f"rename `{renamed[0]}` to `{renamed[1]}` in the names of the file; another tool changed them"
    return "use the base model that the adapter was trained on: `base_model_name_or_path` in `adapter_config.json`"


def _find_renaming(expected: Collection[str], found: Collection[str]) -> tuple[str, str] | None:
    """Return a part of the names and its replacement, if that turns every unexpected name into an expected one."""
    unknown, missing = sorted(set(found) - set(expected)), sorted(set(expected) - set(found))
    for name in missing if unknown and len(unknown) == len(missing) else ():
        parts, own = unknown[0].split("."), name.split(".")
        fewest = min(len(parts), len(own))
        start = next((at for at in range(fewest) if parts[at] != own[at]), fewest)
        most = fewest - start
        end = next((at for at in range(most) if parts[-1 - at] != own[-1 - at]), most)
        if start + end == fewest:  # a part was added or left out: its neighbour names the place
            start, end = (start, end - 1) if end else (max(0, start - 1), end)
        old, new = (".".join(["", *names[start : len(names) - end], ""][not start :]) for names in (parts, own))
        if not end:
            old, new = old.removesuffix("."), new.removesuffix(".")
        if old and {one.replace(old, new, 1) for one in unknown} <= set(expected):
            return old, new
    return None
