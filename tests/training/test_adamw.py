"""Which weights decay; the update itself is held against torch's in `test_step.py`."""

import torch
from torch import nn

from tunewell.config.schema import Train
from tunewell.training.optimizers.adamw import AdamW


def test_norms_and_vectors_do_not_decay_whatever_their_shape() -> None:
    """Cohere's norms of queries and keys have a row for each head; by their shape alone they would be matrices."""
    layer = "model.layers.0"
    decay = {
        f"{layer}.self_attn.q_proj.weight": (8, 8),
        f"{layer}.self_attn.q_proj.lora_A": (2, 8),
        "model.normalized_embedding.weight": (8, 8),
    }
    spared = {
        f"{layer}.self_attn.q_norm.weight": (4, 8),
        f"{layer}.input_layernorm.weight": (8,),
        f"{layer}.self_attn.q_proj.bias": (8,),
        "model.norm.weight": (8,),
    }
    parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in (decay | spared).items()}
    groups = AdamW(parameters, Train(weight_decay=0.1)).torch_optimizer.param_groups
    names = {id(own): name for name, own in parameters.items()}
    found = {group["weight_decay"]: {names[id(own)] for own in group["params"]} for group in groups}
    assert found == {0.1: set(decay), 0.0: set(spared)}
