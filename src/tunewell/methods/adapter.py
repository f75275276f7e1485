"""Put an adapter on a model, and read and write it in PEFT's format, both ways."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tunewell.config.schema import Method
from tunewell.core.errors import UserError
from tunewell.methods.lora import (
    Fp32Embedding,
    Fp32Linear,
    LoraLinear,
    chosen_layers,
    endings_of,
    linears_of,
    outermost,
    with_tied,
)
from tunewell.methods.peft_format import (
    CONFIG,
    WEIGHTS,
    Adapter,
    Selection,
    adapter_config,
    ending_of,
    in_peft,
    is_within,
    layer_of,
    named_parameters_of,
    own_name,
    peft_name,
    read_adapter_config,
    saved_in,
    selected,
    stacked_experts,
    tables_in,
    tied_names,
)

__all__ = [
    "CONFIG",
    "WEIGHTS",
    "Adapter",
    "adapter_config",
    "adapter_tensors",
    "add_lora",
    "load_adapter",
    "load_tensors",
    "notes_of",
    "switched_off",
    "train_everything",
    "trainable",
]


def add_lora(model: PreTrainedModel, method: Method, *, seed: int, inside: str = "") -> Adapter:
    """Freeze a model and put fresh matrices beside its linear layers; raise UserError for names it does not have.

    `inside` says where the model lies in the one it is the text part of.
    """
    chosen = chosen_layers(model, method)
    adapter = Adapter(
        rank=method.rank,
        alpha=method.alpha,
        dropout=method.dropout,
        rslora=method.rslora,
        is_tied=bool(tied_names(model)),
        **in_peft(model, chosen, inside),
    )
    _put_on(model, adapter, chosen)
    generator = torch.Generator().manual_seed(seed)
    for module in _lora_modules(model).values():
        module.draw(generator)
    return adapter


def notes_of(model: PreTrainedModel, method: Method) -> list[str]:
    """Say what an adapter leaves as it is though its targets sound as if it did not: experts that are stacked."""
    experts = stacked_experts(model)
    names = {ending_of(name.removesuffix(".weight")) for name in experts}
    if not experts or not (method.targets == "all-linear" or {"gate_proj", "up_proj", *names} & set(method.targets)):
        return []
    # Without the layer: `mlp.experts.down_proj`.
    kept = sorted({name.split(f".{layer_of(name)}.", 1)[-1] for name in experts})
    share = sum(own.numel() for own in experts.values()) / sum(own.numel() for own in model.parameters())
    return [
        "the routed experts are left as they are: LoRA takes linear layers here, and this model keeps its experts in "
        f"{', '.join(f'`{name}`' for name in kept)} ({share:.0%} of its weights)"
    ]


def train_everything(model: PreTrainedModel) -> None:
    """Make every weight trainable, in fp32."""
    model.float()
    model.requires_grad_(True)


def adapter_tensors(model: PreTrainedModel, adapter: Adapter) -> dict[str, Tensor]:
    """Give an adapter's tensors under PEFT's names; a head that is one with the embedding comes twice, as PEFT asks."""
    tensors = {
        peft_name(name, adapter.inside): parameter.detach()
        for name, parameter in model.named_parameters()
        if name.endswith((".lora_A", ".lora_B")) or is_within(name, adapter.whole)
    }
    twins = [peft_name(f"{name}.weight", adapter.inside) for name in tied_names(model)]
    for own in [tensors[name] for name in twins if name in tensors]:
        for name in twins:
            tensors.setdefault(name, own.clone())
    return tensors


def trainable(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Give what is trained, by name; a tensor that has two names is given once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def load_adapter(model: PreTrainedModel, folder: Path, *, inside: str = "") -> Adapter:
    """Put an adapter that PEFT or tunewell wrote on a model; raise UserError for kinds that ours cannot compute."""
    config, where = read_adapter_config(folder), str(folder / WEIGHTS)
    tensors = {own_name(name): tensor for name, tensor in load_file(folder / WEIGHTS).items()}
    _refuse_apart(model, tensors, is_tied=bool(config.get("ensure_weight_tying")), where=where)
    targets, layers = config.get("target_modules") or (), config.get("layers_to_transform")
    linears = tuple(linears_of(model))
    wanted = selected(linears, targets)
    layers = None if layers is None else tuple([layers] if isinstance(layers, int) else layers)
    if layers is not None:
        wanted = tuple(name for name in wanted if layer_of(name) in layers)
    wanted += named_parameters_of(linears, config.get("target_parameters") or (), str(folder / CONFIG))
    saved_by = tuple(config.get("modules_to_save") or ())
    names = [name for name, _ in model.named_modules() if name]
    # PEFT also writes the embedding and the head of a lengthened vocabulary, and does not say so in its settings.
    whole = with_tied(model, outermost((*saved_in(names, saved_by, tensors), *tables_in(model, tensors))))
    chosen = Selection(
        linears=tuple(dict.fromkeys(name for name in wanted if not is_within(name, whole))),
        whole=whole,
        endings=tuple(endings_of(wanted)) if isinstance(targets, str) else tuple(targets),
        layers=layers,
        saved_by=saved_by,
    )
    adapter = Adapter(
        rank=config["r"],
        alpha=config["lora_alpha"],
        dropout=config.get("lora_dropout", 0.0),
        rslora=bool(config.get("use_rslora")),
        is_tied=bool(tied_names(model)),
        **in_peft(model, chosen, inside),
    )
    _put_on(model, adapter, chosen)
    load_tensors(model, tensors, where=where)
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
    own = {peft_name(name): parameter for name, parameter in trainable(model).items()}
    tensors = {own_name(name): tensor for name, tensor in tensors.items()}
    twins = [peft_name(f"{name}.weight") for name in tied_names(model)]
    if given := [tensors[name] for name in twins if name in tensors]:
        kept = {name: tensor for name, tensor in tensors.items() if name not in twins}
        tensors = kept | {name: given[0] for name in twins if name in own}
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


def _refuse_apart(model: PreTrainedModel, tensors: dict[str, Tensor], *, is_tied: bool, where: str) -> None:
    """Raise UserError for an adapter that trained a head apart from the embedding that it is one with here."""
    given = [own for name in tied_names(model) if (own := tensors.get(peft_name(f"{name}.weight"))) is not None]
    if not given or (len(given) == 1 and is_tied):
        return
    shared: Any = model.get_input_embeddings().weight
    other = given[1] if len(given) == 2 else shared.detach().cpu().to(given[0].dtype)
    if not torch.equal(given[0], other):
        raise UserError(
            "the adapter holds a head and an embedding that differ, but in this model the two are one",
            where=where,
            fix="train it again with PEFT's `ensure_weight_tying: true`; or let PEFT merge it into a model with "
            "`tie_word_embeddings: false`, and give that",
        )


def _put_on(model: PreTrainedModel, adapter: Adapter, chosen: Selection) -> None:
    model.requires_grad_(False)
    for name in chosen.linears:
        base = model.get_submodule(name)
        assert isinstance(base, nn.Linear)
        wrapped = LoraLinear(base, rank=adapter.rank, scale=adapter.scale, dropout=adapter.dropout)
        wrapped.train(base.training)
        model.set_submodule(name, wrapped)
    for name in chosen.whole:
        _train_whole(model, name)


def _train_whole(model: PreTrainedModel, name: str) -> None:
    """Train a module in fp32; where the head and the embedding are one, they stay one."""
    module = model.get_submodule(name)
    tied = name in tied_names(model)
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


def _lora_modules(model: PreTrainedModel) -> dict[str, LoraLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}
