"""A linear layer with a low-rank matrix beside it, and whole modules trained in fp32 beside a 16-bit model.

    y = x W^T + b  +  scale * (x A^T) B^T        W, b frozen; A: rank x in, B: out x rank, trained in fp32

What is trained is kept in fp32 and cast for each use, so that small updates are not rounded away and gradients of
several micro-batches add up in fp32.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LoraLinear(nn.Module):
    """A frozen linear layer and its low-rank matrices."""

    def __init__(self, base: nn.Linear, *, rank: int, scale: float, dropout: float) -> None:
        super().__init__()
        self.base_layer = base
        self.scale = scale
        self.dropout = dropout
        self.is_on = True
        device = base.weight.device
        self.lora_A = nn.Parameter(torch.empty(rank, base.in_features, device=device, dtype=torch.float32))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank, device=device, dtype=torch.float32))

    @property
    def in_features(self) -> int:
        return self.base_layer.in_features

    @property
    def out_features(self) -> int:
        return self.base_layer.out_features

    @property
    def weight(self) -> Tensor:
        """Give the frozen weight: some models look at it for its precision."""
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias

    def draw(self, generator: torch.Generator) -> None:
        """Begin as PEFT does: A uniform as a linear layer's weight is, B zero, so that nothing changes at first."""
        bound = self.in_features**-0.5
        drawn = torch.rand(self.lora_A.shape, generator=generator) * (2 * bound) - bound
        with torch.no_grad():
            self.lora_A.copy_(drawn)
            self.lora_B.zero_()

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.base_layer.weight, self.base_layer.bias
        if not self.is_on:
            return F.linear(x, weight, bias)
        a, b = self.lora_A.to(weight.dtype), self.lora_B.to(weight.dtype)
        if self.dropout and self.training:
            seen = F.dropout(x, self.dropout)
            return F.linear(x, weight, bias) + F.linear(F.linear(seen, a) * self.scale, b)
        if torch.compiler.is_compiling():
            return F.linear(x, weight, bias) + F.linear(F.linear(x, a) * self.scale, b)
        return _LowRank.apply(x.flatten(0, -2), self.scale, weight, bias, a, b).unflatten(0, x.shape[:-1])


class _LowRank(torch.autograd.Function):
    """The same arithmetic with the low-rank part added in place: one pass less over the output and over the gradient.

    No gradient is computed for W, and none for x unless something below it is trained.
    """

    @staticmethod
    def forward(
        ctx: Any, x_TK: Tensor, scale: float, w_NK: Tensor, bias_N: Tensor | None, a_RK: Tensor, b_NR: Tensor
    ) -> Tensor:
        xa_TR = x_TK @ a_RK.T
        ctx.save_for_backward(x_TK, xa_TR, w_NK, a_RK, b_NR)
        ctx.scale = scale
        return F.linear(x_TK, w_NK, bias_N).addmm_(xa_TR, b_NR.T, alpha=scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        [dy_TN] = grads
        x_TK, xa_TR, w_NK, a_RK, b_NR = ctx.saved_tensors
        none = x_TK.new_zeros(())
        dxa_TR = torch.addmm(none, dy_TN, b_NR, beta=0, alpha=ctx.scale)
        # Transposed: a product with so few columns is two to five times slower than one with so few rows.
        db_NR = torch.addmm(none, xa_TR.T, dy_TN, beta=0, alpha=ctx.scale).T
        dx_TK = (dy_TN @ w_NK).addmm_(dxa_TR, a_RK) if ctx.needs_input_grad[0] else None
        return dx_TK, None, None, None, dxa_TR.T @ x_TK, db_NR


class Fp32Embedding(nn.Embedding):
    """An embedding trained in fp32 that answers in the precision the model computes in."""

    answer_dtype: torch.dtype = torch.float32

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).to(self.answer_dtype)


class Fp32Linear(nn.Linear):
    """A linear layer trained in fp32 that computes in the precision of what it is given."""

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return F.linear(input, self.weight.to(input.dtype), bias)
