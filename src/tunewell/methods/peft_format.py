"""Adapters in PEFT's own words: what its settings say, which layers they select, and what its tensors are called."""

import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from tunewell.core.errors import UserError
from tunewell.models.support import INSIDE

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX, _MODEL = "base_model.model.", "model."
_LAYER = re.compile(r"\.(?:layers|h|blocks|block)\.(\d+)\.")
_EXPERT_NAMES = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
"""Where experts are stacked in one parameter, PEFT takes layers of these names for the experts themselves."""
_REFUSED: dict[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "bias": ("none", None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "trainable_token_indices": (None,),
    "exclude_modules": (None,),
    "layer_replication": (None,),
    "alora_invocation_tokens": (None,),
    "use_qalora": (False, None),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    # The others change the weights below the matrices as the adapter is loaded: PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
"""Settings of PEFT that change what an adapter computes, and the values under which ours computes the same."""


@dataclass(frozen=True)
class Adapter:
    """What is needed to put the same adapter on the same model again, as PEFT is told it."""

    rank: int
    alpha: float
    dropout: float
    rslora: bool
    targets: tuple[str, ...]
    """Names that the paths of its linear layers end in; whole paths where such names would take other layers too."""
    layers: tuple[int, ...] | None
    modules_to_save: tuple[str, ...]
    is_tied: bool = False
    """Whether the head and the embedding are one, and trained as one."""
    parameters: tuple[str, ...] = ()
    """Weights of further linear layers, by path: those that PEFT would take for experts if they were targets."""
    whole: tuple[str, ...] = ()
    """Paths of the modules that are trained as a whole, in the model that is trained."""
    inside: str = ""
    """Where the model lies in what `AutoModelForCausalLM` makes of its files, for the text part of a larger one."""

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


@dataclass(frozen=True)
class Selection:
    """The layers of a model that are trained, by path: with matrices beside them, or as a whole."""

    linears: tuple[str, ...]
    whole: tuple[str, ...]
    endings: tuple[str, ...]
    """The names they were chosen by."""
    layers: tuple[int, ...] | None
    saved_by: tuple[str, ...]
    """The names that modules trained as a whole were chosen by."""


def adapter_config(adapter: Adapter, base_model: str | None) -> str:
    """Write PEFT's `adapter_config.json`."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        # PEFT refuses it beside parameters. It says only how to train on.
        "lora_dropout": 0.0 if adapter.parameters else adapter.dropout,
        "use_rslora": adapter.rslora,
        "target_modules": sorted(adapter.targets),
        "layers_to_transform": None if adapter.layers is None else list(adapter.layers),
        "modules_to_save": list(adapter.modules_to_save) or None,
        "ensure_weight_tying": adapter.is_tied and bool(adapter.modules_to_save),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
    }
    if adapter.parameters:
        config["target_parameters"] = sorted(adapter.parameters)
    return json.dumps(config, indent=2, sort_keys=True) + "\n"


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Read the settings of an adapter; raise UserError for kinds that ours cannot compute."""
    path = folder / CONFIG
    if not path.is_file():
        raise UserError(f"`{folder}` holds no adapter", where=f"looked for `{path}`")
    config = json.loads(path.read_text(encoding="utf-8"))
    if config.get("peft_type") != "LORA":
        raise UserError(f"the adapter is of the kind {config.get('peft_type')}, and only LORA is read", where=str(path))
    for key, harmless in _REFUSED.items():
        if config.get(key, harmless[0]) not in harmless:
            raise UserError(
                f"the adapter uses `{key}: {config[key]}`, which tunewell does not compute",
                where=str(path),
                fix="merge it into its base with PEFT (`merge_and_unload`), and give the merged model",
            )
    return config


def in_peft(model: nn.Module, chosen: Selection, inside: str) -> dict[str, Any]:
    """Say to PEFT which layers are meant, such that it takes these and no others."""
    names = [name for name, _ in model.named_modules() if name]
    has_experts = bool(stacked_experts(model))
    as_weights = [name for name in chosen.linears if has_experts and ending_of(name) in _EXPERT_NAMES]
    plain = [name for name in chosen.linears if name not in as_weights]
    endings = tuple(end for end in chosen.endings if any(is_named(name, end) for name in plain))
    taken = [name for name in names if any(is_named(name, end) for end in endings)]
    taken = [name for name in taken if chosen.layers is None or layer_of(name) in chosen.layers]
    is_exact = not inside and {name for name in taken if not is_within(name, chosen.whole)} == set(plain)
    return {
        "targets": endings if is_exact else tuple(whole_name(name, inside) for name in plain),
        "layers": chosen.layers if is_exact else None,
        "parameters": tuple(f"{whole_name(name, inside)}.weight" for name in as_weights),
        "modules_to_save": _saved(names, chosen, inside),
        "whole": chosen.whole,
        "inside": inside,
    }


def _saved(names: Collection[str], chosen: Selection, inside: str) -> tuple[str, ...]:
    """Name the modules that are trained as a whole; PEFT takes every path that ends in the letters of a name."""
    endings = tuple(dict.fromkeys(ending_of(name) for name in chosen.whole))
    for ends in () if inside else (chosen.saved_by, endings):
        if {name for name in names if name.endswith(ends)} == set(chosen.whole):
            return ends
    return tuple(whole_name(name, inside) for name in chosen.whole)


def named_parameters_of(names: Iterable[str], parameters: Sequence[str], where: str) -> tuple[str, ...]:
    """Find the linear layers whose weights PEFT's `target_parameters` name; raise UserError for other parameters."""
    found = []
    for wanted in parameters:
        own = [name for name in names if any(is_named(f"{each}.weight", wanted) for each in (name, _in_whole(name)))]
        if not own:
            raise UserError(
                f"the adapter uses `target_parameters: {wanted}`, which tunewell does not compute", where=where
            )
        found += own
    return tuple(dict.fromkeys(found))


def selected(names: Iterable[str], targets: str | Sequence[str]) -> tuple[str, ...]:
    """Find what PEFT's `target_modules` select, be they written for the text part or for the model it is a part of."""
    if targets == "all-linear":
        return tuple(names)
    if isinstance(targets, str):
        return tuple(x for x in names if any(re.fullmatch(targets, own) for own in (x, _in_whole(x))))
    return tuple(x for x in names if any(is_named(own, end) for own in (x, _in_whole(x)) for end in targets))


def saved_in(names: Iterable[str], wanted: Sequence[str], tensors: Collection[str]) -> tuple[str, ...]:
    """Find the modules that an adapter holds as a whole: by name, and where only their letters fit, by its file."""
    found = []
    for name in names:
        fits = [end for end in wanted if name.endswith(end) or _in_whole(name).endswith(end)]
        is_meant = any(is_named(name, end) or is_named(_in_whole(name), end) for end in fits)
        if is_meant or (fits and any(own.startswith(f"{_PREFIX}{name}.") for own in tensors)):
            found.append(name)
    return tuple(found)


def tables_in(model: PreTrainedModel, tensors: Collection[str]) -> tuple[str, ...]:
    """Name the embedding and the head where an adapter's file holds them."""
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    return tuple(
        name
        for name, module in model.named_modules()
        if any(module is own for own in tables) and f"{_PREFIX}{name}.weight" in tensors
    )


def stacked_experts(model: nn.Module) -> dict[str, Tensor]:
    """Give the parameters that hold the matrices of several experts at once, by name."""
    convolved = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Conv1d)}
    return {name: own for name, own in model.named_parameters() if own.dim() == 3 and name not in convolved}


def peft_name(name: str, inside: str = "") -> str:
    """Name a tensor as PEFT does."""
    return _PREFIX + re.sub(r"\.(lora_[AB])$", r".\1.weight", whole_name(name, inside))


def own_name(name: str) -> str:
    """Give PEFT's name of a tensor of the text part, where it is that in the whole model."""
    return _PREFIX + _MODEL + name.removeprefix(_PREFIX + INSIDE) if name.startswith(_PREFIX + INSIDE) else name


def whole_name(name: str, inside: str) -> str:
    """Say what a path in the text part is in the whole model; in a model that is no part it is the same."""
    return inside + name.removeprefix(_MODEL) if inside and name.startswith(_MODEL) else name


def _in_whole(name: str) -> str:
    return whole_name(name, INSIDE)


def is_named(path: str, end: str) -> bool:
    """Whether a path is what PEFT's `target_modules` mean by a name."""
    return path == end or path.endswith(f".{end}")


def is_within(path: str, modules: Iterable[str]) -> bool:
    """Whether a module is one of these, or lies in one of them."""
    return any(path == own or path.startswith(f"{own}.") for own in modules)


def layer_of(path: str) -> int | None:
    """Give the number of the layer that a module lies in."""
    found = _LAYER.search(f".{path}.")
    return int(found[1]) if found else None


def ending_of(path: str) -> str:
    """Give the last part of a path."""
    return path.rpartition(".")[2]


def tied_names(model: PreTrainedModel) -> tuple[str, ...]:
    """Name the embedding and the head where the two are one; nothing where they are not."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or getattr(head, "weight", None) is not getattr(embedding, "weight", 0):
        return ()
    names = {module: name for name, module in model.named_modules()}
    return names[embedding], names[head]
