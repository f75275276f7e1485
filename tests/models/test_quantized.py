"""Quantised layers against bitsandbytes, PEFT and plain arithmetic."""

from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from bitsandbytes import functional
from lessons import tiny_llama
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tunewell.models import attention
from tunewell.models.quantized import (
    QuantizedLinear,
    dequantize_model,
    quantize_model,
    quantized_names,
    quantized_product,
    take_over,
)
from tunewell.records.plan import QuantizedBase

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _linear(dtype: torch.dtype, *, bias: bool = False, shape: tuple[int, int] = (96, 160)) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(*shape, bias=bias).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(96, 160), (64, 3), (35, 7), (576, 1536)])
def test_nf4_is_bit_equal_to_bitsandbytes(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Guards the codes and the weights: an adapter belongs to exactly these."""
    linear = _linear(dtype, shape=shape)
    packed, state = functional.quantize_4bit(
        linear.weight.detach(), blocksize=64, compress_statistics=True, quant_type="nf4"
    )
    layer = QuantizedLinear.quantize(linear, "nf4", CPU)
    assert torch.equal(layer.packed, packed)
    assert layer.weight.dtype == dtype
    assert torch.equal(layer.weight, functional.dequantize_4bit(packed, state))


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_rounds_each_row_to_the_nearest_of_255_levels(dtype: torch.dtype) -> None:
    """Guards the scale of each row, and rows of zeros."""
    linear = _linear(dtype)
    with torch.no_grad():
        linear.weight[3] = 0
    layer, weight = QuantizedLinear.quantize(linear, "int8", CPU), linear.weight.detach().float()
    half_a_level = weight.abs().amax(1) / 127 / 2
    rounding = torch.finfo(dtype).eps * weight.abs().amax(1)
    error = (layer.weight.float() - weight).abs().amax(1)
    assert (error <= half_a_level * 1.001 + rounding).all()
    assert (layer.weight[3] == 0).all()


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("bias", [False, True])
def test_output_and_gradient_are_those_of_the_dequantised_weight(kind: str, bias: bool) -> None:
    """Guards the two products of the custom operator, alone and compiled."""
    layer = QuantizedLinear.quantize(_linear(torch.float32, bias=bias), kind, CPU)
    plain = layer.to_linear(torch.float32)
    x = torch.randn(2, 5, 96, requires_grad=True)
    for forward in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        x.grad = None
        (forward(x) ** 2).sum().backward()
        found, x.grad = x.grad, None
        (plain(x) ** 2).sum().backward()
        assert torch.allclose(layer(x), plain(x), atol=1e-6)
        assert found is not None and x.grad is not None and torch.allclose(found, x.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_the_operator_passes_torchs_own_checks(kind: str) -> None:
    """Guards its shape function and its autograd registration, which `torch.compile` relies on."""
    layer = QuantizedLinear.quantize(_linear(torch.float32), kind, CPU)
    x = torch.randn(3, 96, requires_grad=True)
    torch.library.opcheck(quantized_product, (x, layer.parts, layer.form, layer.out_features, True))


def test_nothing_dequantised_is_kept_for_the_backward_pass() -> None:
    """Guards the memory of QLoRA: between the passes there are only packed weights."""
    layer = QuantizedLinear.quantize(_linear(torch.float32), "nf4", CPU)
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(torch.randn(3, 96, requires_grad=True))
    assert all(tensor.shape != (160, 96) for tensor in saved) and len(saved) == len(layer.parts)


def test_the_head_and_kept_layers_are_not_quantised() -> None:
    """Guards `method.keep` and the names that transformers would skip."""
    model = tiny_llama()
    expected = {name for name in quantized_names(model) if not name.endswith("down_proj")}
    quantize_model(model, QuantizedBase(kind="nf4", keep=["down_proj"]), CPU)
    found = {name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    assert found == expected and "lm_head" not in found and len(found) == 6 * model.config.num_hidden_layers


@pytest.mark.parametrize("is_nested", [True, False])
@pytest.mark.parametrize("code", ["nf4", "fp4", "int8"])
def test_a_model_saved_by_bitsandbytes_is_read_bit_equal(tmp_path: Path, code: str, is_nested: bool) -> None:
    """Guards pre-quantised folders, with a layer that was left out."""
    tiny_llama().save_pretrained(tmp_path / "plain")
    how = BitsAndBytesConfig(
        load_in_4bit=code != "int8",
        load_in_8bit=code == "int8",
        bnb_4bit_quant_type="nf4" if code == "int8" else code,
        bnb_4bit_use_double_quant=is_nested,
        llm_int8_skip_modules=["lm_head", "down_proj"],
    )
    saved: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=how, device_map="cpu")
    saved.save_pretrained(tmp_path / "quantized")
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "quantized", device_map="cpu", dtype=torch.float32)
    expected = {}
    for name, module in loaded.named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            expected[name] = functional.dequantize_4bit(module.weight.data, module.weight.quant_state).float()
        elif isinstance(module, bnb.nn.Linear8bitLt):
            expected[name] = functional.int8_vectorwise_dequant(module.weight.data, module.weight.SCB)
    assert take_over(loaded, torch.float32) == len(expected) == 6 * loaded.config.num_hidden_layers
    for name, weight in expected.items():
        assert torch.allclose(loaded.get_submodule(name).weight, weight, rtol=1e-6, atol=0), name


def test_a_dequantised_model_is_plain_and_equal() -> None:
    """Guards the export of a merged model."""
    model = tiny_llama()
    quantize_model(model, QuantizedBase(kind="nf4"), CPU)
    ids = torch.arange(12)[None]
    with attention.stock_attention(model):
        before = model(ids).logits
    dequantize_model(model, torch.float32)
    assert not any(isinstance(module, QuantizedLinear) for module in model.modules())
    with attention.stock_attention(model):
        assert torch.allclose(model(ids).logits, before, atol=1e-6)


def test_all_tensors_of_a_layer_are_on_one_device() -> None:
    """Guards training on a GPU: a run is refused if a tensor of its model stays on the CPU."""
    packed = torch.empty(4, 8, dtype=torch.int8, device="meta")
    parts = {"packed": packed, "scales": torch.empty(4, device="meta")}
    layer = QuantizedLinear("int8", (4, 8), parts, None, torch.bfloat16)
    assert {buffer.device.type for buffer in layer.buffers()} == {"meta"}
    assert layer.dtype == torch.bfloat16
