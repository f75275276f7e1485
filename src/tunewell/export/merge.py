"""Fold what was trained beside a model's weights into the weights, so that any program can load it."""

import torch
from transformers import PreTrainedModel

from tunewell.core.errors import UserError
from tunewell.methods.lora import LoraLinear
from tunewell.models.placement import not_finite_names


@torch.no_grad()
def merge(model: PreTrainedModel) -> int:
    """Put plain linear layers in the place of those with matrices beside them; give how many there were.

    The sum is made in fp32, in which the model must be: in 16 bits the small part of it would be rounded away.
    Raises UserError where the result is not finite.
    """
    beside = {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}
    for name, module in beside.items():
        base = module.base_layer
        if base.weight.dtype != torch.float32:
            raise TypeError(f"`{name}` is in {base.weight.dtype}, not in fp32")
        base.weight.add_(module.lora_B @ module.lora_A, alpha=module.scale)
        model.set_submodule(name, base)
    if broken := not_finite_names(model):
        raise UserError(
            f"the merged model is not finite: `{broken[0]}` and {len(broken) - 1} more tensors",
            fix="look at the run: `tunewell validate RUN`",
        )
    model.requires_grad_(False)
    return len(beside)
