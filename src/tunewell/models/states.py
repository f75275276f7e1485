"""Layers that carry a state along the row (convolutions, recurrences): start them anew at each document.

    row        a a a a b b c c c c c       one row of T tokens
    mixer      [a a a a] [b b] [c c c c c]  one call per run of documents of equal length, each from an empty state

Everything else in a layer (norms, MLPs, experts) runs on the whole row, and attention keeps documents apart itself. The
mixers call transformers' own code, so a hybrid model gives the same values as alone. They learn where documents begin
from a hook on the decoder layer, because not every layer passes its keyword arguments on. With gradient checkpointing,
the backward pass calls the layer again with the same arguments, so the hook runs again too.
"""

from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tunewell.model_files.families import table
from tunewell.models.attention import LAYOUT_KEYS

_RECURRENT = ("LightningAttention",)
"""Endings of the names of mixers without a convolution."""


def stateful_mixers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that carry a state along the row: those with a convolution over it, and linear attention."""
    for module in model.modules():
        has_convolution = any(isinstance(child, nn.Conv1d) for child in module.children())
        if has_convolution or type(module).__name__.endswith(_RECURRENT):
            yield module


def has_states(model: nn.Module) -> bool:
    """Return whether a model carries a state along the row in any layer."""
    return next(stateful_mixers(model), None) is not None


def prepare_packing(model: PreTrainedModel) -> None:
    """Make stateful layers start anew at each document of a packed row, and show every layer where documents begin.

    Without the layout of a packed row among its arguments, the model computes as before. Calling it twice is harmless.
    """
    for module in stateful_mixers(model):
        # A bound method, which `copy.deepcopy` binds to the copied module.
        module.forward = MethodType(_forward_by_document, module)
    config = model.config.get_text_config()
    is_needed = has_states(model) or config.model_type in table()["layout_by_hook"]
    for layer in model.modules() if is_needed else ():
        if isinstance(layer, GradientCheckpointingLayer) and _lend_layout not in layer._forward_pre_hooks.values():
            layer.register_forward_pre_hook(_lend_layout, with_kwargs=True)


def _lend_layout(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Show the modules of a layer where documents begin; without a packed row, take it away."""
    layout = {name: kwargs[name] for name in LAYOUT_KEYS if name in kwargs}
    for module in layer.modules():
        module.__dict__["packed_layout"] = layout


def _forward_by_document(mixer: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a mixer once per run of documents of equal length, as one batch without padding."""
    layout = kwargs | getattr(mixer, "packed_layout", {})
    runs, forward = layout.get("packed_runs"), type(mixer).forward
    if runs is None:
        return forward(mixer, *args, **kwargs)
    hidden_1TH: Tensor = args[0] if args else kwargs.pop("hidden_states")
    sizes, kept = [number * length for number, length in runs], dict[str, Any]()
    per_token = {"hidden_states": hidden_1TH}
    for name, value in kwargs.items():
        is_per_token = isinstance(value, Tensor) and value.shape[:2] == hidden_1TH.shape[:2]
        if is_per_token:
            per_token[name] = value
        elif name not in LAYOUT_KEYS:
            kept[name] = value
    if any(isinstance(value, Tensor) for value in (*args[1:], *kept.values())):
        raise NotImplementedError("a layer with a state has an input that is not per token")
    pieces = [
        dict(zip(per_token, own, strict=True))
        for own in zip(*(x.split(sizes, 1) for x in per_token.values()), strict=True)
    ]
    outs, is_tuple = list[Tensor](), False
    for (number, length), piece in zip(runs, pieces, strict=True):
        folded = {name: value.unflatten(1, (number, length))[0] for name, value in piece.items()}
        out = forward(mixer, folded.pop("hidden_states"), *args[1:], **folded, **kept)
        is_tuple = isinstance(out, tuple)
        outs.append((out[0] if is_tuple else out).flatten(0, 1))
    joined = torch.cat(outs)[None]
    return (joined, None) if is_tuple else joined  # without a cache, the rest of the tuple is None
