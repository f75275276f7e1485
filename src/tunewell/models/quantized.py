"""Frozen linear layers stored in 4 bits (NF4, in the format of bitsandbytes) or 8 bits.

A weight is dequantised for each use, in the forward pass and again in the backward pass, and never kept:

    layer = QuantizedLinear.quantize(linear, "nf4", torch.device("cuda"))
    y = layer(x)                   # x W^T, with W in the dtype of x
    layer.weight                   # W, dequantised now

The kernels of bitsandbytes are used, but not its layers: on CPUs with AVX512-BF16, `Linear4bit` repacks its weight in
an evaluation, and every later gradient is wrong.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.quantizers.quantizers_utils import should_convert_module

from tunewell.core.optional import import_optional
from tunewell.records.plan import QuantizedBase

_BLOCK, _NESTED_BLOCK = 64, 256


class QuantizedLinear(nn.Module):
    """A frozen linear layer with a quantised weight."""

    is_matrix = True
    cached: Tensor | None = None
    """The dequantised weight while answers are generated, where each token would dequantise it again."""
    bias: Tensor | None
    _dtype_holder: Tensor
    """An empty buffer, which `model.float()` converts with the rest of the model."""

    def __init__(
        self, form: str, shape: tuple[int, int], parts: dict[str, Tensor], bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.form = form
        """`int8`, or the code and the size of a block: `nf4:64`."""
        self.out_features, self.in_features = shape
        for name, tensor in parts.items():
            self.register_buffer(name, tensor)
        self.register_buffer("bias", bias)
        device = next(iter(parts.values())).device
        self.register_buffer("_dtype_holder", torch.empty(0, dtype=dtype, device=device), persistent=False)
        self._names = tuple(parts)

    @classmethod
    def quantize(cls, linear: nn.Linear, kind: str, device: torch.device) -> Self:
        """Quantise a layer on a device."""
        weight = linear.weight.detach().to(device)
        form, parts = ("int8", _to_int8(weight)) if kind == "int8" else _to_nf4(weight)
        bias = None if linear.bias is None else linear.bias.detach().to(device)
        return cls(form, (linear.out_features, linear.in_features), parts, bias, weight.dtype)

    @classmethod
    def from_bitsandbytes(cls, layer: Any, dtype: torch.dtype) -> Self:
        """Take over the weight of a `Linear4bit` or `Linear8bitLt` of a model that was saved quantised."""
        bias, weight = None if layer.bias is None else layer.bias.detach().to(dtype), layer.weight
        shape = (layer.out_features, layer.in_features)
        if hasattr(weight, "SCB"):
            scales = layer.state.SCB if weight.SCB is None else weight.SCB
            return cls("int8", shape, {"packed": weight.data, "scales": scales.float() / 127}, bias, dtype)
        form, parts = _parts_of(weight.data, weight.quant_state)
        return cls(form, shape, parts, bias, dtype)

    @property
    def parts(self) -> list[Tensor]:
        """The tensors from which the weight is computed."""
        return [getattr(self, name) for name in self._names]

    @property
    def weight(self) -> Tensor:
        """The weight, dequantised to the model's dtype."""
        if self.cached is not None:
            return self.cached
        return dequantize(self.parts, self.form, self.out_features, self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model."""
        return self._dtype_holder.dtype

    def forward(self, x: Tensor) -> Tensor:
        if self.cached is not None:
            return F.linear(x, self.cached, self.bias)
        y = quantized_product(x, self.parts, self.form, self.out_features, True)
        return y if self.bias is None else y + self.bias

    def to_linear(self, dtype: torch.dtype) -> nn.Linear:
        """Return a plain layer with the dequantised weight."""
        linear = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        linear.weight = nn.Parameter(self.weight.to(dtype), requires_grad=False)
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias.to(dtype), requires_grad=False)
        return linear


def quantized_names(model: PreTrainedModel, keep: Sequence[str] = ()) -> list[str]:
    """Return the paths of the layers that are quantised: all `nn.Linear` except the head and those in `keep`."""
    head = model.get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module is not head and not is_kept(name, keep)
    ]


def is_kept(name: str, keep: Iterable[str]) -> bool:
    """Return whether a layer stays in 16 bits."""
    return not should_convert_module(name, list(keep))


def quantize_model(model: PreTrainedModel, base: QuantizedBase, device: torch.device) -> None:
    """Quantise the linear layers of a model on the CPU one by one, and move the rest of it to the device."""
    for name in quantized_names(model, base.keep):
        linear: Any = model.get_submodule(name)
        model.set_submodule(name, QuantizedLinear.quantize(linear, base.kind, device))
    nn.Module.to(model, device)


def dequantize_model(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Replace quantised layers by plain ones with the same weights, and convert the model to a dtype."""
    for name, layer in [(name, part) for name, part in model.named_modules() if isinstance(part, QuantizedLinear)]:
        model.set_submodule(name, layer.to_linear(dtype))
    nn.Module.to(model, dtype)


def take_over(model: PreTrainedModel, dtype: torch.dtype) -> int:
    """Replace the layers of bitsandbytes in a model that was saved quantised, and return their number."""
    kinds = ("Linear4bit", "Linear8bitLt")
    found = [(name, part) for name, part in model.named_modules() if type(part).__name__ in kinds]
    for name, layer in found:
        model.set_submodule(name, QuantizedLinear.from_bitsandbytes(layer, dtype))
    return len(found)


def _to_int8(weight_NK: Tensor) -> dict[str, Tensor]:
    """Round each row to 255 levels between its largest absolute value and the negative of it."""
    scales_N = weight_NK.float().abs().amax(1) / 127
    levels = (weight_NK.float() / scales_N.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round()
    return {"packed": levels.to(torch.int8), "scales": scales_N}


def _to_nf4(weight: Tensor) -> tuple[str, dict[str, Tensor]]:
    functional: Any = import_optional("bitsandbytes.functional", extra="qlora", purpose="`method.quantize: nf4`")
    packed, state = functional.quantize_4bit(weight, blocksize=_BLOCK, compress_statistics=True, quant_type="nf4")
    return _parts_of(packed, state)


def _parts_of(packed: Tensor, state: Any) -> tuple[str, dict[str, Tensor]]:
    """Return form and tensors of a weight that bitsandbytes has quantised to 4 bits."""
    parts = {"packed": packed.view(torch.uint8), "absmax": state.absmax}
    if state.nested:  # the largest values of the blocks are quantised to 8 bits
        nested = state.state2
        if nested.blocksize != _NESTED_BLOCK:
            raise ValueError(f"nested blocks of {nested.blocksize} values are not supported")
        parts |= {"nested_absmax": nested.absmax, "nested_code": nested.code, "offset": state.offset}
    return f"{state.quant_type}:{state.blocksize}", parts


def dequantize(parts: Sequence[Tensor], form: str, num_rows: int, dtype: torch.dtype) -> Tensor:
    """Return a weight in a dtype. It is computed in fp32 and rounded once."""
    packed, scales, *nested = parts
    if form == "int8":
        return (packed * scales[:, None]).to(dtype)
    ops = torch.ops.bitsandbytes
    if nested:
        nested_absmax, nested_code, offset = nested
        scales = ops.dequantize_blockwise(scales, nested_absmax, nested_code, _NESTED_BLOCK, torch.float32) + offset
    code, _, block = form.partition(":")
    shape = [num_rows, packed.numel() * 2 // num_rows]
    return ops.dequantize_4bit(packed, scales, int(block), code, shape, dtype)


@torch.library.custom_op("tunewell::quantized_product", mutates_args=())
def quantized_product(x: Tensor, parts: Sequence[Tensor], form: str, num_rows: int, is_transposed: bool) -> Tensor:
    """Return x W^T, or x W. Compiled code treats this as one step, so it does not keep W for the backward pass."""
    weight = dequantize(parts, form, num_rows, x.dtype)
    return x @ (weight.T if is_transposed else weight)


@quantized_product.register_fake
def _(x: Tensor, parts: Sequence[Tensor], form: str, num_rows: int, is_transposed: bool) -> Tensor:
    num_columns = parts[0].numel() * (1 if form == "int8" else 2) // num_rows
    return x.new_empty(*x.shape[:-1], num_rows if is_transposed else num_columns)


def _keep_parts(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, parts, *ctx.settings, ctx.is_transposed = inputs
    ctx.save_for_backward(*parts)


def _product_grad(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    parts = list(ctx.saved_tensors)
    dx = quantized_product(dy, parts, *ctx.settings, not ctx.is_transposed)
    return dx, [None] * len(parts), None, None, None


quantized_product.register_autograd(_product_grad, setup_context=_keep_parts)
