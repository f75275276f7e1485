"""The loss of the tokens that are learned, and its gradient, without ever holding all their logits.

The head is applied only where a next token is learned, some rows at a time. The gradient is made on the way forward,
while the logits are there, so nothing is computed twice: two matrix products for a frozen head, three for a trained.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Logits of one chunk, in fp32, stay below this: 256 rows of a 49k vocabulary on a CPU, 2,048 on a GPU.
_CPU_BYTES, _GPU_BYTES = 64 * 2**20, 512 * 2**20
COMPILED_ROWS = 2048
"""Rows of a chunk where `loss_and_slope` is compiled, for this one shape."""


@dataclass(frozen=True)
class HeadShape:
    """What a model does to its logits beside the matrix product."""

    softcap: float | None = None
    scale: float = 1.0


def chunk_rows(vocab_size: int, device: torch.device) -> int:
    """Choose how many rows of logits, in fp32, are held at once."""
    budget = _GPU_BYTES if device.type == "cuda" else _CPU_BYTES
    rows = max(64, budget // (4 * vocab_size))
    return 1 << (rows.bit_length() - 1)


def loss_and_slope(logits_RV: Tensor, targets_R: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Give the summed loss of some rows and its gradient by their logits, which are overwritten.

    A target of -100 counts for nothing.
    """
    z_RV = logits_RV.float()
    bent_RV = None if softcap is None else torch.tanh(z_RV / softcap)
    if bent_RV is not None and softcap is not None:
        z_RV = bent_RV * softcap
    keep_R1 = (targets_R != -100)[:, None]
    at_R1 = targets_R.clamp_min(0)[:, None]
    top_R1, aim_R1 = z_RV.amax(-1, keepdim=True), z_RV.gather(-1, at_R1)
    # In place from here on: each pass over the logits costs as much as the next, and one over new memory more.
    dz_RV = z_RV.sub_(top_R1).exp_()
    sum_R1 = dz_RV.sum(-1, keepdim=True)
    total = ((top_R1 - aim_R1 + sum_R1.log()) * keep_R1).sum()
    dz_RV.mul_(keep_R1 / sum_R1).scatter_add_(-1, at_R1, -keep_R1.to(dz_RV.dtype))
    if bent_RV is not None:
        dz_RV.mul_(1 - bent_RV * bent_RV)
    return total, dz_RV.to(logits_RV.dtype)


def loss_and_grad_fused(logits_RV: Tensor, targets_R: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Compute the same in a form that a compiler makes two passes of: nothing in fp32 is ever written to memory."""
    z_RV = logits_RV.float()
    bent_RV = None if softcap is None else torch.tanh(z_RV / softcap)
    if bent_RV is not None and softcap is not None:
        z_RV = bent_RV * softcap
    keep_R = targets_R != -100
    at_R1 = targets_R.clamp_min(0)[:, None]
    lse_R1 = torch.logsumexp(z_RV, -1, keepdim=True)
    total = ((lse_R1 - z_RV.gather(-1, at_R1))[:, 0] * keep_R).sum()
    is_target_RV = torch.arange(z_RV.shape[1], device=z_RV.device)[None, :] == at_R1
    dz_RV = (torch.exp(z_RV - lse_R1) - is_target_RV.float()) * keep_R[:, None]
    if bent_RV is not None:
        dz_RV = dz_RV * (1 - bent_RV * bent_RV)
    return total, dz_RV.to(logits_RV.dtype)


class _LearnedRowsLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_RH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, targets_R: Tensor, how: "_How"
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden_RH.device)
        dh_RH = torch.empty_like(hidden_RH) if ctx.needs_input_grad[0] else None
        dw_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        db_V = torch.zeros_like(weight_VH[:, 0], dtype=torch.float32) if ctx.needs_input_grad[2] else None
        weight = weight_VH.to(hidden_RH.dtype)
        bias = None if bias_V is None else bias_V.to(hidden_RH.dtype)
        for at in range(0, len(targets_R), how.rows):
            rows = slice(at, at + how.rows)
            logits_RV = F.linear(hidden_RH[rows], weight, bias)
            if how.head.scale != 1.0:
                logits_RV = logits_RV * how.head.scale
            part, dz_RV = how.slope(logits_RV, targets_R[rows], how.head.softcap)
            total += part
            if how.head.scale != 1.0:
                dz_RV = dz_RV * how.head.scale
            if dh_RH is not None:
                torch.mm(dz_RV, weight, out=dh_RH[rows])
            if dw_VH is not None:
                dw_VH += dz_RV.T @ hidden_RH[rows]
            if db_V is not None:
                db_V += dz_RV.sum(0)
        ctx.save_for_backward(dh_RH, dw_VH, db_V)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        [grad] = grads
        dh_RH, dw_VH, db_V = ctx.saved_tensors
        return (*(None if slope is None else slope * grad for slope in (dh_RH, dw_VH, db_V)), None, None)


@dataclass(frozen=True)
class _How:
    rows: int
    head: HeadShape
    slope: Callable[[Tensor, Tensor, float | None], tuple[Tensor, Tensor]]


def supervised_loss(
    hidden_RH: Tensor,
    targets_R: Tensor,
    *,
    weight_VH: Tensor,
    bias_V: Tensor | None = None,
    head: HeadShape | None = None,
    slope: Callable[[Tensor, Tensor, float | None], tuple[Tensor, Tensor]] | None = None,
) -> Tensor:
    """Sum the loss of rows of hidden states against their targets.

    `slope` may be a compiled `loss_and_slope_fused`; the number of rows must then be a multiple of COMPILED_ROWS.
    """
    rows = chunk_rows(weight_VH.shape[0], hidden_RH.device) if slope is None else COMPILED_ROWS
    how = _How(rows, head or HeadShape(), slope or loss_and_slope)
    total = _LearnedRowsLoss.apply(hidden_RH, weight_VH, bias_V, targets_R, how)
    assert isinstance(total, Tensor)
    return total
