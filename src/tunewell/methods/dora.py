"""DoRA: LoRA with a trained magnitude for each row of an adapted weight, in PEFT's format.

    V = W + scale * B A        y = magnitude / |V| * (V x)        |V|: the norm of each row, without gradient

|V|^2 = |W|^2 + 2 scale (W A^T . B) + scale^2 (B A A^T . B) per row needs neither B A nor an identity matrix.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tunewell.core.errors import UserError
from tunewell.methods.lora import Lora, LoraLinear, low_rank_grads


class DoraLinear(LoraLinear):
    """A frozen linear layer with low-rank matrices and a magnitude for each output."""

    squares: Tensor
    """Squared norms of the rows of the frozen weight."""

    def __init__(self, base: Any, *, rank: int, scale: float, dropout: float) -> None:
        super().__init__(base, rank=rank, scale=scale, dropout=dropout)
        if self.is_transposed:
            raise UserError(
                "DoRA cannot adapt the layers of GPT-2, which store their weights transposed",
                where="`method.kind: dora`",
                fix="use `method.kind: lora`",
            )
        norms_N = _row_norms(base.weight)
        self.lora_magnitude_vector = nn.Parameter(norms_N.clone())
        self.register_buffer("squares", norms_N.square(), persistent=False)
        self._cast_norms: Tensor | None = None

    @torch.no_grad()
    def norms(self) -> Tensor:
        """Return the norms of the rows of V."""
        a, b, weight = self.lora_A, self.lora_B, self.base_layer.weight
        cross_N = ((weight @ a.T.to(weight.dtype)) * b).sum(1)
        low_rank_N = ((b @ (a @ a.T)) * b).sum(1)
        squares_N = self.squares + 2 * self.scale * cross_N + self.scale**2 * low_rank_N
        return squares_N.clamp(min=torch.finfo(torch.float32).tiny).sqrt()

    def cast(self, dtype: torch.dtype | None) -> None:
        """Cache the matrices in the model's dtype, and the norms, for decoding. None clears the cache."""
        super().cast(dtype)
        self._cast_norms = None if dtype is None else self.norms()

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_enabled:
            return self.base_layer(x)
        a, b = self._cast or (self.lora_A.to(x.dtype), self.lora_B.to(x.dtype))
        # In fp32, because the factors are near 1, where bf16 has steps of 0.4% and 0.8%.
        factors_N = self.lora_magnitude_vector / (self.norms() if self._cast_norms is None else self._cast_norms)
        has_dropout = self.dropout > 0 and self.training
        if has_dropout or not self._is_plain or torch.compiler.is_compiling():
            return self._composed(x, factors_N, a, b, has_dropout=has_dropout)
        flat = x.flatten(0, -2)
        out = _Magnitude.apply(flat, self.scale, self.base_layer, factors_N, a, b)
        return out.unflatten(0, x.shape[:-1])

    def _composed(self, x: Tensor, factors_N: Tensor, a: Tensor, b: Tensor, *, has_dropout: bool) -> Tensor:
        """Compute the output from plain operations. With dropout, as in PEFT, only the change sees dropped inputs."""
        out, bias = self.base_layer(x), self.base_layer.bias
        if not has_dropout:
            # The sum first: compiled code then keeps one output for the gradient of the factors, and not two.
            plain = out if bias is None else out - bias
            scaled = (plain + F.linear(F.linear(x, a) * self.scale, b)) * factors_N
            return (scaled if bias is None else scaled + bias).to(out.dtype)
        dropped = F.dropout(x, self.dropout)
        plain = self.base_layer(dropped) if bias is None else self.base_layer(dropped) - bias
        low_rank = F.linear(F.linear(dropped, a) * self.scale, b)
        return (out + (factors_N - 1) * plain + factors_N * low_rank).to(out.dtype)

    def merged(self) -> nn.Module:
        """Return the frozen layer with the weight magnitude / |V| * V, in fp32 to avoid rounding errors."""
        base: Any = super().merged()
        base.weight.mul_((self.lora_magnitude_vector / _row_norms(base.weight).clamp(min=_MIN_NORM))[:, None])
        return base

    @torch.no_grad()
    def weight_change(self, rows: slice) -> Tensor:
        """Return rows of magnitude / |V| * V - W."""
        weight = self.base_layer.weight[rows].cpu().double()
        raised = weight + super().weight_change(rows)
        norms = raised.square().sum(1).sqrt().clamp(min=_MIN_NORM)
        factors = self.lora_magnitude_vector[rows].cpu().double() / norms
        return factors[:, None] * raised - weight

    def change_direction(self) -> Tensor | None:
        """Return the first right singular vector of the change, by power iteration."""
        change = self.weight_change(slice(None))
        vector = change.square().sum(0)
        for _ in range(_POWER_STEPS):
            norm = vector.norm()
            if not float(norm):
                return None
            vector = change.T @ (change @ (vector / norm))
        return vector / vector.norm() if float(vector.norm()) else None


_POWER_STEPS = 32
_MIN_NORM = torch.finfo(torch.float32).tiny ** 0.5
"""A row of zeros, as pruned models have them, stays zero instead of becoming NaN."""


class Dora(Lora):
    """DoRA on frozen linear layers, saved in PEFT's format."""

    layer_class: ClassVar = DoraLinear
    is_dora: ClassVar = True

    @classmethod
    def reads(cls, config: Mapping[str, Any]) -> bool:
        """Return True for adapters of PEFT's type LORA with `use_dora`."""
        return config.get("peft_type") == "LORA" and bool(config.get("use_dora"))


class _Magnitude(torch.autograd.Function):
    """DoRA with the low-rank part added in place. The factors are in fp32.

    The gradient of the magnitudes needs the output before scaling. It is computed from the output, which the next
    operation often saves too.

    Shapes: T tokens, K inputs, N outputs, R rank.
    """

    @staticmethod
    def forward(
        ctx: Any, x_TK: Tensor, scale: float, base: nn.Linear, factors_N: Tensor, a_RK: Tensor, b_NR: Tensor
    ) -> Tensor:
        xa_TR = x_TK @ a_RK.T
        y_TN = F.linear(x_TK, base.weight).addmm_(xa_TR, b_NR.T, alpha=scale).mul_(factors_N)
        if base.bias is not None:
            y_TN += base.bias
        ctx.save_for_backward(x_TK, xa_TR, factors_N, a_RK, b_NR, y_TN)
        ctx.scale, ctx.base = scale, base
        return y_TN

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        [dy_TN] = grads
        x_TK, xa_TR, factors_N, a_RK, b_NR, y_TN = ctx.saved_tensors
        scaled_TN = y_TN if ctx.base.bias is None else y_TN - ctx.base.bias
        dots_N = torch.linalg.vecdot(dy_TN.T, scaled_TN.T).float()
        dfactors_N = torch.where(factors_N == 0, 0, dots_N / factors_N)
        du_TN = torch.mul(dy_TN, factors_N, out=torch.empty_like(dy_TN))
        dx_TK, da_RK, db_NR = low_rank_grads(ctx, du_TN, x_TK, xa_TR, a_RK, b_NR)
        return dx_TK, None, None, dfactors_N, da_RK, db_NR


def _row_norms(weight_NK: Tensor) -> Tensor:
    return torch.linalg.vector_norm(weight_NK.detach(), dim=1, dtype=torch.float32)
