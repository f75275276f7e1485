"""A linear layer with a low-rank matrix beside it, and whole modules trained in fp32 beside a 16-bit model.

    y = x W^T + b  +  scale * (x A^T) B^T        W, b frozen; A: rank x in, B: out x rank, trained in fp32

What is trained is kept in fp32 and cast for each use, so that small updates are not rounded away and gradients of
several micro-batches add up in fp32.
"""

from collections.abc import Sequence
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
        return _LowRank.apply(x.flatten(0, -2), (self.scale,), weight, bias, a, b)[0].unflatten(0, x.shape[:-1])


def read_together(linears: Sequence[nn.Module], x: Tensor) -> tuple[Tensor, ...]:
    """Apply linear layers to the same input: of those with low-rank matrices, the narrow products are made at once."""
    given: list[Tensor | None] = []
    for linear in linears:
        is_drawing = isinstance(linear, LoraLinear) and linear.dropout and linear.training
        if not isinstance(linear, LoraLinear) or not linear.is_on or is_drawing or _is_watched(linear):
            return tuple(linear(x) for linear in linears)
        weight = linear.base_layer.weight
        given += [weight, linear.base_layer.bias, linear.lora_A.to(weight.dtype), linear.lora_B.to(weight.dtype)]
    scales = tuple(linear.scale for linear in linears if isinstance(linear, LoraLinear))
    return tuple(y.unflatten(0, x.shape[:-1]) for y in _LowRank.apply(x.flatten(0, -2), scales, *given))


def _is_watched(module: nn.Module) -> bool:
    """Whether someone waits for this module to be called: a search for what went bad, say."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)


class _LowRank(torch.autograd.Function):
    """The same arithmetic with the low-rank part added in place: one pass less over the output, and over the gradient.

    For any number of layers that read the same input; given are W, bias, A and B of each. A gradient for W is never
    made, and one for x only where something below it is trained.
    """

    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, scales: tuple[float, ...], *given: Any) -> tuple[Tensor, ...]:
        weights, biases, downs, ups = (given[at::4] for at in range(4))
        a_RK = downs[0] if len(downs) == 1 else torch.cat(downs)
        xa_TR = x_TK @ a_RK.T
        parts = xa_TR.split([len(a) for a in downs], 1)
        ctx.save_for_backward(x_TK, a_RK, xa_TR, *weights, *ups)
        ctx.scales = scales
        return tuple(
            F.linear(x_TK, w_NK, bias).addmm_(xa, b_NR.T, alpha=scale)
            for w_NK, bias, b_NR, xa, scale in zip(weights, biases, ups, parts, scales, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TK, a_RK, xa_TR, *rest = ctx.saved_tensors
        weights, ups = rest[: len(grads)], rest[len(grads) :]
        sizes = [b.shape[1] for b in ups]
        none, dx_TK, d_parts, d_ups = x_TK.new_zeros(()), None, [], []
        for dy_TN, w_NK, b_NR, xa, scale in zip(grads, weights, ups, xa_TR.split(sizes, 1), ctx.scales, strict=True):
            d_parts.append(torch.addmm(none, dy_TN, b_NR, beta=0, alpha=scale))
            # The other way round: a product with so few columns is two to five times slower than one with so few rows.
            d_ups.append(torch.addmm(none, xa.T, dy_TN, beta=0, alpha=scale).T)
            if ctx.needs_input_grad[0]:
                dx_TK = dy_TN @ w_NK if dx_TK is None else dx_TK.addmm_(dy_TN, w_NK)
        dxa_TR = d_parts[0] if len(d_parts) == 1 else torch.cat(d_parts, 1)
        if dx_TK is not None:
            dx_TK.addmm_(dxa_TR, a_RK)
        d_downs = (dxa_TR.T @ x_TK).split(sizes)
        return (dx_TK, None, *(d for a, b in zip(d_downs, d_ups, strict=True) for d in (None, None, a, b)))


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
