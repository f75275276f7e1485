"""LoRA on GPT-2, whose layers store their weights transposed (`Conv1D`)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from family_configs import build
from peft import PeftModel
from transformers.pytorch_utils import Conv1D

from tunewell.config.extensions import METHODS
from tunewell.config.schema import MethodSettings
from tunewell.core.errors import UserError
from tunewell.methods.base import adapter_layers
from tunewell.methods.lora import Lora

IDS = torch.arange(3, 20)[None]


def _trained() -> tuple[Any, Lora]:
    model = build("gpt2")
    method = Lora.apply(model, MethodSettings(rank=4, alpha=8), seed=0)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B"):
            parameter.data.normal_(std=0.1)
    return model, method


@torch.no_grad()
def test_peft_gives_the_logits_of_our_adapter(tmp_path: Path) -> None:
    model, method = _trained()
    expected = model(IDS).logits
    files = method.files("gpt2")
    files.write(tmp_path)
    assert '"fan_in_fan_out": true' in files.texts["adapter_config.json"]
    theirs = PeftModel.from_pretrained(build("gpt2"), str(tmp_path))
    torch.testing.assert_close(theirs(input_ids=IDS).logits, expected, rtol=1e-5, atol=1e-5)
    ours = build("gpt2")
    Lora.load(ours, tmp_path)
    torch.testing.assert_close(ours(IDS).logits, expected, rtol=0, atol=0)


@torch.no_grad()
def test_the_merged_weight_is_the_stored_one_plus_the_change_that_is_verified() -> None:
    """`weight_change` is how an export is verified: it must have the orientation of the stored weight."""
    model, method = _trained()
    expected = model(IDS).logits
    changes = {name: layer.weight_change(slice(None)) for name, layer in adapter_layers(model).items()}
    directions = {name: layer.change_direction() for name, layer in adapter_layers(model).items()}
    before = {name: layer.base_layer.weight.clone() for name, layer in adapter_layers(model).items()}
    assert method.merge() == 4 * 4
    for name, change in changes.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, Conv1D)
        torch.testing.assert_close(layer.weight.double(), before[name].double() + change, rtol=1e-5, atol=1e-6)
        direction = directions[name]
        assert direction is not None
        assert float((change @ direction).norm()) == pytest.approx(float(torch.linalg.matrix_norm(change, 2)), rel=1e-6)
    torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-4, atol=1e-4)


def test_dora_on_such_layers_is_refused_with_the_way_out() -> None:
    with pytest.raises(UserError, match="store their weights transposed") as caught:
        METHODS.load("dora").apply(build("gpt2"), MethodSettings(kind="dora", rank=4, alpha=8), seed=0)
    assert caught.value.fix == "use `method.kind: lora`"


def test_layers_that_share_a_weight_or_are_read_by_kernels_get_no_adapter() -> None:
    """Merging would add several adapters to one weight; a kernel that reads the weight would skip the adapter."""
    for kind, absent in (("zamba2", "shared_transf"), ("bamba", "mamba.out_proj"), ("longcat_flash", "classifier")):
        model = build(kind)
        Lora.apply(model, MethodSettings(rank=4, alpha=8), seed=0)
        adapted = adapter_layers(model)
        assert adapted and not [name for name in adapted if absent in name]
