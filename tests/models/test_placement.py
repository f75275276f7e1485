"""Where a model lies and how precise it is, proven and not assumed."""

import pytest
import torch
from tiny_models import tiny

from tunewell.core.errors import UserError
from tunewell.models.load import verify_placement

CPU = torch.device("cpu")


def frozen(kind: str = "llama", dtype: torch.dtype = torch.bfloat16):
    model = tiny(kind).requires_grad_(False)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def test_a_model_as_ordered_passes():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        verify_placement(frozen(dtype=dtype), device=CPU, dtype=dtype)


def test_what_is_trained_is_in_fp32_and_what_is_not_is_in_the_precision_asked_for():
    model = frozen()
    model.model.norm.weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"`model.norm.weight` is in bfloat16 \(1 in all\)"):
        verify_placement(model, device=CPU, dtype=torch.bfloat16)
    model.model.norm.weight.data = model.model.norm.weight.data.float()
    verify_placement(model, device=CPU, dtype=torch.bfloat16)


def test_a_config_that_says_bf16_and_a_model_in_fp32_are_told_apart():
    """A run whose config said bf16 and whose launcher said "no" cost its owner days."""
    with pytest.raises(
        RuntimeError, match=r"frozen parameters in bfloat16 .* `model.embed_tokens.weight` is in float32"
    ):
        verify_placement(frozen(dtype=torch.float32), device=CPU, dtype=torch.bfloat16)


def test_a_parameter_on_another_device_is_named():
    model = frozen()
    model.model.layers[2].mlp.up_proj.to("meta")
    with pytest.raises(RuntimeError, match=r"`model.layers.2.mlp.up_proj.weight` was never loaded"):
        verify_placement(model, device=CPU, dtype=torch.bfloat16)
    with pytest.raises(
        RuntimeError, match=r"on cuda:0 .* `model.embed_tokens.weight` is on cpu, .* more \(\d+ in all\)"
    ):
        verify_placement(frozen(), device=torch.device("cuda:0"), dtype=torch.bfloat16)


def test_positions_in_16_bits_are_refused():
    """`model.to(bfloat16)` casts the rotary frequencies too, and long documents lose their order."""
    with pytest.raises(RuntimeError, match=r"inv_freq` is in bfloat16, which is not precise enough"):
        verify_placement(frozen().to(torch.bfloat16), device=CPU, dtype=torch.bfloat16)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_number_that_is_none_is_found(number, dtype):
    model = frozen(dtype=dtype)
    model.model.layers[3].self_attn.k_proj.weight.data[1, 5] = number
    with pytest.raises(UserError, match=r"`model.layers.3.self_attn.k_proj.weight` contains NaN or infinity \(1 in"):
        verify_placement(model, device=CPU, dtype=dtype)


def test_many_offenders_are_counted_and_the_first_are_named():
    model = frozen()
    for parameter in model.parameters():
        parameter.data[:] = float("nan")
    number = len(list(model.parameters()))
    with pytest.raises(UserError, match=rf"and {number - 5} more \({number} in all\)"):
        verify_placement(model, device=CPU, dtype=torch.bfloat16)


def test_what_a_model_keeps_in_fp32_itself_may_stay_there():
    """Some classes keep routers in fp32 whatever is asked; that is their precision, not ours to refuse."""
    model = frozen()
    model.model.norm.weight.data = model.model.norm.weight.data.float()
    model._keep_in_fp32_modules_strict = ["norm"]
    verify_placement(model, device=CPU, dtype=torch.bfloat16)
