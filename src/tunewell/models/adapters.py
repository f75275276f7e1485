"""Put an adapter on a model, and read and write it in PEFT's format, both ways."""

import difflib
import json
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tunewell.config.schema import Method
from tunewell.core.errors import UserError
from tunewell.models.lora import Fp32Embedding, Fp32Linear, LoraLinear

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
_LAYER = re.compile(r"\.(?:layers|h|blocks|block)\.(\d+)\.")
_REFUSED = {
    "use_dora": (False, None),
    "bias": ("none", None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
    "exclude_modules": (None,),
}
"""Settings of PEFT that change what an adapter computes, and the values under which ours computes the same."""


@dataclass(frozen=True)
class Adapter:
    """What is needed to put the same adapter on the same model again."""

    rank: int
    alpha: float
    dropout: float
    rslora: bool
    targets: tuple[str, ...]
    """Names that the paths of its linear layers end in."""
    layers: tuple[int, ...] | None
    modules_to_save: tuple[str, ...]
    is_tied: bool = False
    """Whether the head and the embedding are one, and trained as one."""

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


def add_lora(model: PreTrainedModel, method: Method, *, seed: int) -> Adapter:
    """Freeze a model and put fresh matrices beside its linear layers; raise UserError for names it does not have."""
    linears = _linears(model)
    wanted = tuple(linears) if method.targets == "all-linear" else _matching(linears, method.targets, "linear layer")
    layers = None if method.layers == "all" else tuple(method.layers)
    if layers is not None:
        wanted = tuple(name for name in wanted if _layer_of(name) in layers)
    if not wanted:
        raise UserError(
            "no linear layer is left to put an adapter on",
            where=f"`method.targets` {method.targets!r}, `method.layers` {method.layers!r}",
            fix="the model's linear layers are: " + ", ".join(_endings(linears)),
        )
    adapter = Adapter(
        rank=method.rank,
        alpha=method.alpha,
        dropout=method.dropout,
        rslora=method.rslora,
        targets=tuple(_endings(wanted)) if method.targets == "all-linear" else tuple(method.targets),
        layers=layers,
        modules_to_save=method.modules_to_save,
        is_tied=_is_tied(model),
    )
    _put_on(model, adapter, wanted)
    generator = torch.Generator().manual_seed(seed)
    for module in _lora_modules(model).values():
        module.draw(generator)
    return adapter


def train_everything(model: PreTrainedModel) -> None:
    """Make every weight trainable, in fp32."""
    model.float()
    model.requires_grad_(True)


def adapter_tensors(model: PreTrainedModel, adapter: Adapter) -> dict[str, Tensor]:
    """Give the trained tensors under PEFT's names; a head that is one with the embedding comes twice, as PEFT asks."""
    tensors = {_peft_name(name): parameter.detach() for name, parameter in trainable(model).items()}
    if adapter.is_tied:
        names = {module: name for name, module in model.named_modules()}
        ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
        for own in ends:
            if names[own].rpartition(".")[2] in adapter.modules_to_save:
                tensors.setdefault(_peft_name(f"{names[own]}.weight"), own.weight.detach().clone())
    return tensors


def trainable(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Give what is trained, by name; a tensor that has two names is given once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def adapter_config(adapter: Adapter, base_model: str) -> str:
    """Write PEFT's `adapter_config.json`."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout,
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
    return json.dumps(config, indent=2, sort_keys=True) + "\n"


def load_adapter(model: PreTrainedModel, folder: Path) -> Adapter:
    """Put an adapter that PEFT or tunewell wrote on a model; raise UserError for kinds that ours cannot compute."""
    path = folder / CONFIG
    if not path.is_file():
        raise UserError(f"`{folder}` holds no adapter", where=f"looked for `{path}`")
    config = json.loads(path.read_text(encoding="utf-8"))
    if config.get("peft_type") != "LORA":
        raise UserError(f"the adapter is of the kind {config.get('peft_type')}, and only LORA is read", where=str(path))
    for key, harmless in _REFUSED.items():
        if config.get(key, harmless[0]) not in harmless:
            raise UserError(
                f"the adapter uses `{key}: {config[key]}`, which tunewell does not compute", where=str(path)
            )
    targets, layers = config["target_modules"], config.get("layers_to_transform")
    linears = _linears(model)
    if isinstance(targets, str):
        wanted = tuple(linears) if targets == "all-linear" else tuple(x for x in linears if re.fullmatch(targets, x))
    else:
        wanted = _matching(linears, targets, "linear layer")
    layers = None if layers is None else tuple([layers] if isinstance(layers, int) else layers)
    if layers is not None:
        wanted = tuple(name for name in wanted if _layer_of(name) in layers)
    adapter = Adapter(
        rank=config["r"],
        alpha=config["lora_alpha"],
        dropout=config.get("lora_dropout", 0.0),
        rslora=bool(config.get("use_rslora")),
        targets=tuple(_endings(wanted)) if isinstance(targets, str) else tuple(targets),
        layers=layers,
        modules_to_save=tuple(config.get("modules_to_save") or ()),
        is_tied=_is_tied(model),
    )
    _put_on(model, adapter, wanted)
    load_tensors(model, load_file(folder / WEIGHTS), where=str(folder / WEIGHTS))
    return adapter


@contextmanager
def switched_off(model: PreTrainedModel) -> Iterator[None]:
    """Let a model compute as if it had no matrices; modules that were trained as a whole stay as they are."""
    modules = _lora_modules(model).values()
    for module in modules:
        module.is_on = False
    try:
        yield
    finally:
        for module in modules:
            module.is_on = True


def load_tensors(model: PreTrainedModel, tensors: dict[str, Tensor], *, where: str) -> None:
    """Copy tensors under PEFT's names into an adapter; none may be missing, left over or of another shape."""
    own = {_peft_name(name): parameter for name, parameter in trainable(model).items()}
    if _is_tied(model):
        tensors = _without_twin(model, tensors, own.keys())
    wrong = sorted(own.keys() ^ tensors.keys())
    wrong += [name for name in own.keys() & tensors.keys() if own[name].shape != tensors[name].shape]
    if wrong:
        raise UserError(
            f"the adapter does not fit this model: {len(wrong)} of its tensors are missing, left over or of another "
            f"shape, the first is `{wrong[0]}`",
            where=where,
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(tensors[name])


def _put_on(model: PreTrainedModel, adapter: Adapter, linears: Iterable[str]) -> None:
    model.requires_grad_(False)
    saved = [f".{end}." for end in adapter.modules_to_save]
    for name in linears:
        if any(end in f".{name}." for end in saved):
            continue  # trained as a whole, so there is nothing to put beside it
        base = model.get_submodule(name)
        assert isinstance(base, nn.Linear)
        wrapped = LoraLinear(base, rank=adapter.rank, scale=adapter.scale, dropout=adapter.dropout)
        wrapped.train(base.training)
        model.set_submodule(name, wrapped)
    if adapter.modules_to_save:
        names = [name for name, _ in model.named_modules() if name]
        for name in _matching(names, adapter.modules_to_save, "module"):
            _train_whole(model, name)


def _train_whole(model: PreTrainedModel, name: str) -> None:
    """Train a module in fp32; where the head and the embedding are one, they stay one."""
    module = model.get_submodule(name)
    tied = _is_tied(model) and module in (model.get_input_embeddings(), model.get_output_embeddings())
    # Once, before anything is widened: what is tied has one tensor, which the first of the two widens for both.
    dtype = next(module.parameters()).dtype
    if dtype != torch.float32 and not isinstance(module, nn.Embedding | nn.Linear):
        raise UserError(
            f"`{name}` cannot be trained as a whole beside a 16-bit model: only embeddings and linear layers can",
            fix="take it out of `method.modules_to_save`, or set `train.precision: fp32`",
        )
    for own in [model.get_input_embeddings(), model.get_output_embeddings()] if tied else [module]:
        own.float().requires_grad_(True)
        if dtype != torch.float32 and isinstance(own, nn.Embedding):
            own.__class__ = Fp32Embedding
            own.__dict__["answer_dtype"] = dtype
        elif dtype != torch.float32 and isinstance(own, nn.Linear):
            own.__class__ = Fp32Linear
    if tied:
        model.tie_weights()


def _linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """List the linear layers by path; the head is none of them."""
    head = model.get_output_embeddings()
    return {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head
    }


def _lora_modules(model: PreTrainedModel) -> dict[str, LoraLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def _matching(names: Iterable[str], endings: Iterable[str], kind: str) -> tuple[str, ...]:
    known = list(names)
    found = [name for name in known if any(name == end or name.endswith("." + end) for end in endings)]
    for end in endings:
        if not any(name == end or name.endswith("." + end) for name in known):
            close = difflib.get_close_matches(end, _endings(known), n=1)
            hint = f"did you mean `{close[0]}`? " if close else ""
            raise UserError(f"the model has no {kind} `{end}`", fix=f"{hint}it has: {', '.join(_endings(known)[:20])}")
    return tuple(found)


def _endings(names: Iterable[str]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in names})


def _layer_of(name: str) -> int | None:
    found = _LAYER.search(f".{name}.")
    return int(found[1]) if found else None


def _is_tied(model: PreTrainedModel) -> bool:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and getattr(head, "weight", None) is getattr(embedding, "weight", 0)


def _without_twin(model: PreTrainedModel, tensors: dict[str, Tensor], own: Collection[str]) -> dict[str, Tensor]:
    """Take a head and an embedding that are one from whichever name the file has, under the name the model has."""
    names = {module: _peft_name(f"{name}.weight") for name, module in model.named_modules()}
    twins = [names[model.get_input_embeddings()], names[model.get_output_embeddings()]]
    kept = {name: tensor for name, tensor in tensors.items() if name not in twins}
    given = [tensors[name] for name in twins if name in tensors]
    return kept | {name: given[0] for name in twins if given and name in own}


def _peft_name(name: str) -> str:
    return _PREFIX + re.sub(r"\.(lora_[AB])$", r".\1.weight", name)
