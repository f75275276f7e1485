"""Which layers of a model a method means: those that get matrices, and those that are trained as a whole."""

import difflib
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from tunewell.config.schema import Method
from tunewell.core.errors import UserError
from tunewell.methods.peft_format import Selection, ending_of, is_named, is_within, layer_of, tied_names


def chosen_layers(model: PreTrainedModel, method: Method) -> Selection:
    """Find the layers that a method names; raise UserError where it names what is not there, or one thing twice."""
    linears = linears_of(model)
    is_all = method.targets == "all-linear"
    wanted = tuple(linears) if is_all else _matching(linears, method.targets, "linear layer")
    layers = None if method.layers == "all" else tuple(method.layers)
    if layers is not None:
        _refuse_layers(linears, layers)
        wanted = tuple(name for name in wanted if layer_of(name) in layers)
    names = [name for name, _ in model.named_modules() if name]
    whole = with_tied(model, outermost(_matching(names, method.modules_to_save, "module")))
    if empty := [name for name in whole if next(model.get_submodule(name).parameters(), None) is None]:
        raise UserError(
            f"`{empty[0]}` has no weights to train",
            where="`method.modules_to_save`",
            fix=f"take `{ending_of(empty[0])}` out of it",
        )
    for end in () if is_all else method.targets:
        own = [name for name in wanted if is_named(name, end)]
        if own and all(is_within(name, whole) for name in own):
            raise UserError(
                f"`{end}` cannot both get matrices beside it and be trained as a whole",
                where="`method.targets` and `method.modules_to_save`",
                fix=f"take `{end}` out of one of them",
            )
    kept = tuple(name for name in wanted if not is_within(name, whole))
    if not kept:
        raise UserError(
            "no linear layer is left to put an adapter on",
            where=f"`method.targets` {method.targets!r}, `method.layers` {method.layers!r}, "
            f"`method.modules_to_save` {method.modules_to_save!r}",
            fix="the model's linear layers are: " + ", ".join(endings_of(linears)),
        )
    return Selection(
        linears=kept,
        whole=whole,
        endings=tuple(endings_of(kept)) if is_all else tuple(method.targets),
        layers=layers,
        saved_by=method.modules_to_save,
    )


def _refuse_layers(linears: Iterable[str], layers: Iterable[int]) -> None:
    there = sorted({number for name in linears if (number := layer_of(name)) is not None})
    if missing := [number for number in layers if number not in there]:
        has = f"its layers are {there[0]} to {there[-1]}" if there else "its layers have no numbers"
        raise UserError(
            f"the model has no layer {', '.join(map(str, missing))}",
            where=f"`method.layers` {list(layers)}",
            fix=f"{has}, and its linear layers: {', '.join(endings_of(linears))}",
        )


def outermost(modules: tuple[str, ...]) -> tuple[str, ...]:
    """Leave out modules that lie in others: they are trained with those."""
    return tuple(name for name in modules if not is_within(name, (own for own in modules if own != name)))


def with_tied(model: PreTrainedModel, whole: tuple[str, ...]) -> tuple[str, ...]:
    """Train the embedding with the head and the head with the embedding, where the two are one."""
    twins = tied_names(model)
    return tuple(dict.fromkeys([*whole, *twins])) if set(twins) & set(whole) else whole


def linears_of(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """List the linear layers by path; the head is none of them, nor is a router that only looks like one."""
    head = model.get_output_embeddings()
    # The router of PhiMoE is made of `nn.Linear` and answers with three tensors.
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and "Router" not in type(module).__name__
    }


def _matching(names: Iterable[str], endings: Iterable[str], kind: str) -> tuple[str, ...]:
    known = list(names)
    for end in endings:
        if not any(is_named(name, end) for name in known):
            close = difflib.get_close_matches(end, endings_of(known), n=1)
            hint = f"did you mean `{close[0]}`? " if close else ""
            raise UserError(
                f"the model has no {kind} `{end}`", fix=f"{hint}it has: {', '.join(endings_of(known)[:20])}"
            )
    return tuple(name for name in known if any(is_named(name, end) for end in endings))


def endings_of(names: Iterable[str]) -> list[str]:
    return sorted({ending_of(name) for name in names})


# A linear layer with a low-rank matrix beside it, and whole modules trained in fp32 beside a 16-bit model.


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
