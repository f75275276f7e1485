"""Embeddings and heads trained in fp32 inside a 16-bit model: each casts its own output or weight.

    ids -> embedding (fp32) -> bf16 -> layers (bf16) -> bf16 -> head (fp32, cast to bf16) -> bf16

`compute_dtype` is the precision of all modules between them.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel


class _Fp32Weights:
    """A layer with fp32 weights in a model whose activations have `compute_dtype`."""

    compute_dtype: torch.dtype


class _Fp32Embedding(_Fp32Weights):
    def forward(self, *args: Any, **options: Any) -> Tensor:
        return super().forward(*args, **options).to(self.compute_dtype)  # pyright: ignore[reportAttributeAccessIssue]


class _Fp32Linear(_Fp32Weights):
    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return F.linear(input, self.weight.to(input.dtype), bias)


@cache
def _with_fp32_weights(kind: type[nn.Module]) -> type[nn.Module] | None:
    """Return a subclass that converts. It keeps what the layer computes, such as the scale of Gemma's embedding."""
    mixin = _Fp32Embedding if issubclass(kind, nn.Embedding) else _Fp32Linear
    is_known = mixin is _Fp32Embedding or kind.forward is nn.Linear.forward
    return type(f"Fp32{kind.__name__}", (mixin, kind), {}) if is_known else None


def use_fp32_weights(module: nn.Module, compute_dtype: torch.dtype) -> bool:
    """Convert the weights to fp32, while outputs stay in `compute_dtype`. Return False if the layer cannot do that.

    Embeddings and plain linear layers can.
    """
    if (kind := _with_fp32_weights(type(module))) is None:
        return False
    module.__dict__["compute_dtype"] = compute_dtype
    module.float().__class__ = kind
    return True


def compute_dtype(model: PreTrainedModel) -> torch.dtype:
    """Return the dtype of the activations. `model.dtype` is that of the first weight, which may be trained in fp32."""
    return next((part.compute_dtype for part in model.modules() if isinstance(part, _Fp32Weights)), model.dtype)
