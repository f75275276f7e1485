"""Cross-entropy loss of the supervised tokens and its gradient, in chunks, so that the logits fit in memory.

The head is applied only to supervised positions, some rows at a time. The gradient is computed in the forward pass,
while the logits are in memory, so nothing is computed twice. A chunk takes two matrix products for a frozen head and
three for a trained one.

Shapes: R rows (supervised positions), H hidden size, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Maximum size of the fp32 logits of one chunk: 256 rows of a 49k vocabulary on a CPU, 2,048 on a GPU.
_CPU_BYTES, _GPU_BYTES = 64 * 2**20, 512 * 2**20
COMPILED_ROWS = 2048
"""Rows per chunk if the loss is compiled. It is compiled only for this shape."""
LEAN_ROWS = 256
"""Rows per chunk of a run that saves memory. With 128k tokens in a vocabulary, the logits of 2,048 rows and their
gradient take 1 GiB, a sixth of the memory of a model of 8 B parameters in NF4."""
LossAndGrad = Callable[[Tensor, Tensor, float | None], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class HeadShape:
    """The scale and softcap that a model applies to its logits."""

    softcap: float | None = None
    scale: float = 1.0

    def apply(self, logits: Tensor) -> Tensor:
        """Apply the scale, then the softcap."""
        logits = logits * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


def chunk_rows(vocab_size: int, device: torch.device) -> int:
    """Return the number of rows of logits computed at once."""
    budget = _GPU_BYTES if device.type == "cuda" else _CPU_BYTES
    rows = max(64, budget // (4 * vocab_size))
    return 1 << (rows.bit_length() - 1)


def cross_entropy(logits_RV: Tensor, targets_R: Tensor) -> Tensor:
    """Return the loss of each row."""
    return logits_RV.logsumexp(-1) - logits_RV.gather(-1, targets_R[:, None])[:, 0]


def loss_and_grad(logits_RV: Tensor, targets_R: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Return the summed loss and its gradient with respect to the logits, in place. Targets of -100 are ignored."""
    z_RV, tanh_RV = logits_RV.float(), None
    if softcap is not None:
        tanh_RV = torch.tanh(z_RV / softcap)
        z_RV = tanh_RV * softcap
    keep_R1 = (targets_R != -100)[:, None]
    target_R1 = targets_R.clamp_min(0)[:, None]
    max_R1, target_logit_R1 = z_RV.amax(-1, keepdim=True), z_RV.gather(-1, target_R1)
    # In place from here on: passes over the logits are the main cost, and passes over new memory cost more.
    dz_RV = z_RV.sub_(max_R1).exp_()
    sum_R1 = dz_RV.sum(-1, keepdim=True)
    total = ((max_R1 - target_logit_R1 + sum_R1.log()) * keep_R1).sum()
    dz_RV.mul_(keep_R1 / sum_R1).scatter_add_(-1, target_R1, -keep_R1.to(dz_RV.dtype))
    if tanh_RV is not None:
        dz_RV.mul_(1 - tanh_RV * tanh_RV)
    return total, dz_RV.to(logits_RV.dtype)


def loss_and_grad_fused(logits_RV: Tensor, targets_R: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Compute `loss_and_grad` in a form that torch.compile fuses into two passes, without fp32 values in memory."""
    z_RV, tanh_RV = logits_RV.float(), None
    if softcap is not None:
        tanh_RV = torch.tanh(z_RV / softcap)
        z_RV = tanh_RV * softcap
    keep_R = targets_R != -100
    target_R1 = targets_R.clamp_min(0)[:, None]
    lse_R1 = torch.logsumexp(z_RV, -1, keepdim=True)
    total = ((lse_R1 - z_RV.gather(-1, target_R1))[:, 0] * keep_R).sum()
    is_target_RV = torch.arange(z_RV.shape[1], device=z_RV.device)[None, :] == target_R1
    dz_RV = (torch.exp(z_RV - lse_R1) - is_target_RV.float()) * keep_R[:, None]
    if tanh_RV is not None:
        dz_RV = dz_RV * (1 - tanh_RV * tanh_RV)
    return total, dz_RV.to(logits_RV.dtype)


class _SupervisedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_R: Tensor,
        rows: int,
        head: HeadShape,
        loss_and_grad: LossAndGrad,
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden_RH.device)
        dh_RH = torch.empty_like(hidden_RH) if ctx.needs_input_grad[0] else None
        dw_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        db_V = torch.zeros_like(weight_VH[:, 0], dtype=torch.float32) if ctx.needs_input_grad[2] else None
        weight = weight_VH.to(hidden_RH.dtype)
        bias = None if bias_V is None else bias_V.to(hidden_RH.dtype)
        for at in range(0, len(targets_R), rows):
            chunk = slice(at, at + rows)
            logits_RV = F.linear(hidden_RH[chunk], weight, bias)
            if head.scale != 1.0:
                logits_RV = logits_RV * head.scale
            part, dz_RV = loss_and_grad(logits_RV, targets_R[chunk], head.softcap)
            total += part
            if head.scale != 1.0:
                dz_RV = dz_RV * head.scale
            if dh_RH is not None:
                torch.mm(dz_RV, weight, out=dh_RH[chunk])
            if dw_VH is not None:
                dw_VH += dz_RV.T @ hidden_RH[chunk]
            if db_V is not None:
                db_V += dz_RV.sum(0)
        ctx.save_for_backward(dh_RH, dw_VH, db_V)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        [grad] = grads
        dh_RH, dw_VH, db_V = ctx.saved_tensors
        return (*(None if saved is None else saved * grad for saved in (dh_RH, dw_VH, db_V)), None, None, None, None)


def supervised_loss(
    hidden_RH: Tensor,
    targets_R: Tensor,
    *,
    weight_VH: Tensor,
    bias_V: Tensor | None = None,
    head: HeadShape | None = None,
    fused_loss: LossAndGrad | None = None,
    rows: int | None = None,
) -> Tensor:
    """Return the summed loss of rows of hidden states, `rows` of them at a time.

    `fused_loss` is a compiled `loss_and_grad_fused`. It requires a multiple of `rows`, by default COMPILED_ROWS.
    """
    if rows is None:
        rows = chunk_rows(weight_VH.shape[0], hidden_RH.device) if fused_loss is None else COMPILED_ROWS
    total: Any = _SupervisedLoss.apply(
        hidden_RH, weight_VH, bias_V, targets_R, rows, head or HeadShape(), fused_loss or loss_and_grad
    )
    return total
