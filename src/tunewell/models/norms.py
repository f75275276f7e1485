"""RMS norms on a CPU in half the passes: transformers' own make six tensors, and six more on the way back.

y = x * r * w        r = 1 / sqrt(mean(x^2) + eps), one number a row
"""

from typing import Any

import torch
from torch import Tensor, nn

_CLOSE = 1e-5


def is_rms_norm(module: nn.Module) -> bool:
    """Whether a module is this norm and nothing else: it is tried on a few rows."""
    weight, eps = getattr(module, "weight", None), _eps(module)
    if not type(module).__name__.endswith("RMSNorm") or eps is None or not isinstance(weight, Tensor):
        return False
    if weight.ndim != 1 or weight.dtype != torch.float32 or weight.device.type != "cpu":
        return False
    sizes = torch.tensor([[1e-3], [1.0], [30.0]])
    rows = torch.randn(3, len(weight), generator=torch.Generator().manual_seed(0)) * sizes
    with torch.no_grad():
        try:
            stock = type(module).forward(module, rows)
        except TypeError:
            return False
        ours = _RmsNorm.apply(rows, weight, eps)
    assert isinstance(ours, Tensor)
    return isinstance(stock, Tensor) and torch.allclose(ours, stock, rtol=_CLOSE, atol=1e-7)


def forward(self: Any, x: Tensor, *others: Any, **named: Any) -> Any:
    """Stand in for the forward of such a module; named so that a saved model finds its own again."""
    eps = _eps(self)
    is_ours = x.device.type == "cpu" and x.dtype == self.weight.dtype == torch.float32
    if others or named or not is_ours or eps is None:
        return type(self).forward(self, x, *others, **named)
    return _RmsNorm.apply(x, self.weight, eps)


def _eps(module: nn.Module) -> float | None:
    for name in ("variance_epsilon", "eps"):
        found = getattr(module, name, None)
        if isinstance(found, float):
            return found
    return None


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rate = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        rate.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rate)
        return (x * rate).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        [dy] = grads
        x, weight, rate = ctx.saved_tensors
        dx = dy * weight
        along = torch.linalg.vecdot(dx, x).unsqueeze(-1).mul_(rate.pow(3)).div_(-x.shape[-1])
        dx.mul_(rate).addcmul_(x, along)
        if not ctx.needs_input_grad[1]:
            return dx, None, None
        return dx, (dy * x * rate).flatten(0, -2).sum(0), None
