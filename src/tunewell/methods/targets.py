"""Select the layers that an adapter trains (`method.targets`, `method.layers`, `method.modules_to_save`)."""

from collections import Counter
from collections.abc import Iterable, Iterator

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tunewell.config.schema import MethodSettings
from tunewell.core.errors import UserError, close_names
from tunewell.methods.peft_format import (
    Selection,
    is_named,
    is_within,
    last_name,
    layer_index,
    stacked_experts,
    table_names,
    tied_names,
)
from tunewell.models.states import stateful_mixers


def select_layers(model: PreTrainedModel, settings: MethodSettings) -> Selection:
    """Select the layers listed in the settings. Raise UserError for unknown names and conflicts."""
    linears = linear_layers(model)
    is_all = settings.targets == "all-linear"
    selected = tuple(linears) if is_all else _match(linears, settings.targets, "linear layer")
    layers = None if settings.layers == "all" else tuple(settings.layers)
    if layers is not None:
        require_layers(linears, layers)
        selected = tuple(name for name in selected if layer_index(name) in layers)
    full_modules = _full_modules(model, settings)
    for target in () if is_all else settings.targets:
        matched = [name for name in selected if is_named(name, target)]
        if matched and all(is_within(name, full_modules) for name in matched):
            raise UserError(
                f"`{target}` cannot both get an adapter and be fully fine-tuned",
                where="`method.targets` and `method.modules_to_save`",
                fix=f"remove `{target}` from one of them",
            )
    adapted = tuple(name for name in selected if not is_within(name, full_modules))
    if not adapted:
        raise UserError(
            "no linear layer is left for an adapter",
            where=f"`method.targets` {settings.targets!r}, `method.layers` {settings.layers!r}, "
            f"`method.modules_to_save` {settings.modules_to_save!r}",
            fix="the model's linear layers are: " + ", ".join(last_names(linears)),
        )
    return Selection(
        linears=adapted,
        full_modules=full_modules,
        linear_names=tuple(last_names(adapted)) if is_all else tuple(settings.targets),
        layers=layers,
        full_names=settings.modules_to_save,
    )


def _full_modules(model: PreTrainedModel, settings: MethodSettings) -> tuple[str, ...]:
    names = [name for name, _ in model.named_modules() if name]
    modules = with_tied(model, _match(names, settings.modules_to_save, "module"))
    for name in modules:
        parts = model.get_submodule(name).named_modules(prefix=name)
        if quantized := [path for path, part in parts if getattr(part, "is_matrix", False)]:
            raise UserError(
                f"`{name}` is quantised, so its weights cannot be trained",
                where="`method.modules_to_save`",
                fix=f"remove `{last_name(name)}` from it, or keep it in 16 bits: "
                f"`--set 'method.keep=[{', '.join(last_names(quantized))}]'`",
            )
    if empty := [name for name in modules if next(model.get_submodule(name).parameters(), None) is None]:
        raise UserError(
            f"`{empty[0]}` has no weights to train",
            where="`method.modules_to_save`",
            fix=f"remove `{last_name(empty[0])}` from it",
        )
    return modules


def with_embeddings(settings: MethodSettings, model: PreTrainedModel) -> MethodSettings:
    """Return settings that also fine-tune the embedding and the head, because rows of new tokens are untrained."""
    names = [last_name(name) for name in table_names(model)]
    return settings.model_copy(update={"modules_to_save": tuple(dict.fromkeys([*settings.modules_to_save, *names]))})


def expert_notes(model: PreTrainedModel, settings: MethodSettings) -> list[str]:
    """Return a note if the targets include routed experts, which stay frozen because they share one tensor."""
    experts = stacked_experts(model)
    names = {last_name(name.removesuffix(".weight")) for name in experts}
    is_named_by = settings.targets == "all-linear" or {"gate_proj", "up_proj", *names} & set(settings.targets)
    if not experts or not is_named_by:
        return []
    # Names without the layer index, for example `mlp.experts.down_proj`.
    frozen = sorted({name.split(f".{layer_index(name)}.", 1)[-1] for name in experts})
    share = sum(tensor.numel() for tensor in experts.values()) / sum(tensor.numel() for tensor in model.parameters())
    return [
        "the routed experts stay frozen: LoRA adapts linear layers, and this model stores its experts in "
        f"{', '.join(f'`{name}`' for name in frozen)} ({share:.0%} of its weights)"
    ]


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the linear layers, quantised or not, by path, except the head and routers."""
    left_out = {model.get_output_embeddings(), *_read_by_kernels(model), *_with_shared_weights(model)}
    # The router of PhiMoE is a subclass of `nn.Linear` and returns three tensors, the grouped ones of DeepSeek V4 have
    # several outputs per input, and those of LongCat read its weight.
    left_out |= {
        child for module in model.modules() if "Router" in type(module).__name__ for child in module.children()
    }
    return {
        name: module
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear | Conv1D) or getattr(module, "is_matrix", False))
        and module not in left_out
        and not any(part in type(module).__name__ for part in ("Router", "Grouped"))
    }


def _read_by_kernels(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Yield the layers of Mamba mixers whose weights their kernels read directly, which would skip an adapter."""
    for mixer in stateful_mixers(model):
        if isinstance(getattr(mixer, "D", None), nn.Parameter):
            yield from (getattr(mixer, name) for name in ("out_proj", "dt_proj") if hasattr(mixer, name))


def _with_shared_weights(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Yield the linear layers that share their weight with another one: merging would add several adapters to it."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    times = Counter(id(layer.weight) for layer in layers)
    yield from (layer for layer in layers if times[id(layer.weight)] > 1)


def with_tied(model: PreTrainedModel, modules: tuple[str, ...]) -> tuple[str, ...]:
    """Return modules without those inside others of them, and with both tied tables if they include one."""
    outer = tuple(name for name in modules if not is_within(name, (other for other in modules if other != name)))
    tied = tied_names(model)
    return tuple(dict.fromkeys([*outer, *tied])) if set(tied) & set(outer) else outer


def last_names(paths: Iterable[str]) -> list[str]:
    """Return the distinct last parts of paths, sorted."""
    return sorted({last_name(path) for path in paths})


def require_layers(paths: Iterable[str], layers: Iterable[int]) -> None:
    """Raise UserError if the model has no layer with one of these numbers."""
    known = sorted({index for path in paths if (index := layer_index(path)) is not None})
    if missing := [index for index in layers if index not in known]:
        raise UserError(
            f"the model has no layer {', '.join(map(str, missing))}",
            where=f"`method.layers` {list(layers)}",
            fix=f"the model's layers are {known[0]} to {known[-1]}" if known else "the model's layers have no numbers",
        )


def _match(paths: Iterable[str], names: Iterable[str], kind: str) -> tuple[str, ...]:
    known = list(paths)
    for name in names:
        if not any(is_named(path, name) for path in known):
            close = close_names(name, last_names(known))
            hint = f"did you mean `{close[0]}`? " if close else ""
            raise UserError(
                f"the model has no {kind} `{name}`", fix=f"{hint}the model has: {', '.join(last_names(known)[:20])}"
            )
    return tuple(path for path in known if any(is_named(path, name) for name in names))
