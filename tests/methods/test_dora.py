"""DoRA against PEFT, and its merge against its own forward pass."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lessons import RandomDocuments, distance, lora_learner, tiny_llama
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tunewell.config.schema import MethodSettings
from tunewell.core.errors import UserError
from tunewell.data.batches import make_batch
from tunewell.methods.base import load_adapter
from tunewell.methods.dora import Dora, DoraLinear
from tunewell.methods.lora import Lora
from tunewell.methods.peft_format import peft_name
from tunewell.models.attention import stock_attention
from tunewell.records.adapter import ADAPTER_WEIGHTS

NAMES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SETTINGS = MethodSettings(kind="dora", rank=4, alpha=8)
IDS = torch.arange(20)[None]


def _trained(**changes: Any) -> tuple[PreTrainedModel, Any]:
    """Return a model with DoRA whose every part has changed, and an untouched copy of the model."""
    model = tiny_llama(**changes)
    base = copy.deepcopy(model)
    learner = lora_learner(model, method=SETTINGS)
    with torch.no_grad():
        for name, parameter in learner.parameters.items():
            if name.endswith("lora_magnitude_vector"):
                parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
    return model, base


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad(), stock_attention(model):
        return model(IDS).logits


@pytest.mark.parametrize("has_bias", [False, True])
def test_loss_and_gradients_are_those_of_peft(has_bias: bool) -> None:
    """The reference: PEFT builds B A in each forward pass, which is not needed here."""
    model, base = _trained(attention_bias=has_bias)
    theirs = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=NAMES, use_dora=True))
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    set_peft_model_state_dict(theirs, {peft_name(name): p.detach().clone() for name, p in parameters.items()})
    with stock_attention(model), stock_attention(base):
        ours, wanted = model(IDS, labels=IDS).loss, theirs(IDS, labels=IDS).loss
    ours.backward()
    wanted.backward()
    assert ours.item() == pytest.approx(wanted.item(), rel=1e-5)
    found = {
        name.removeprefix("base_model.model.").replace(".default.weight", ""): p.grad
        for name, p in theirs.named_parameters()
        if p.requires_grad
    }
    assert found.keys() == parameters.keys()
    for name, parameter in parameters.items():
        assert parameter.grad is not None and distance(parameter.grad, found[name]) < 1e-4, name


@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_a_new_adapter_changes_nothing_and_the_composed_form_is_the_same(quantize: str) -> None:
    """Guards the start of training, and the form that is compiled."""
    learner = lora_learner(method=SETTINGS.model_copy(update={"quantize": quantize}))
    layer = next(module for module in learner.model.modules() if isinstance(module, DoraLinear))
    x = torch.randn(3, layer.in_features)
    a, b = layer.lora_A, layer.lora_B
    factors = layer.lora_magnitude_vector / layer.norms()
    assert torch.allclose(layer(x), layer._composed(x, factors, a, b, has_dropout=False), atol=1e-5)
    with torch.no_grad():
        b.zero_()
    assert torch.allclose(layer(x), layer.base_layer(x), atol=1e-5)


@pytest.mark.parametrize("dropout", [None, 0.0, 0.1])
def test_a_small_change_of_the_magnitudes_is_not_rounded_away_in_bf16(dropout: float | None) -> None:
    """Guards the factors near 1: in bf16, the next one above 1 is 1.0078, and a change of 0.3% would have no effect."""
    torch.manual_seed(0)
    layer = DoraLinear(torch.nn.Linear(64, 256, dtype=torch.bfloat16), rank=4, scale=2.0, dropout=dropout or 0.0)
    layer.reset_parameters(torch.Generator().manual_seed(0))
    x = torch.randn(500, 64, dtype=torch.bfloat16)

    def total() -> float:
        if dropout is None:
            y = layer(x)
        else:
            torch.manual_seed(1)
            factors = layer.lora_magnitude_vector / layer.norms()
            a, b = layer.lora_A.to(x.dtype), layer.lora_B.to(x.dtype)
            y = layer._composed(x, factors, a, b, has_dropout=dropout > 0)
        assert y.dtype == torch.bfloat16
        return float((y - layer.base_layer.bias).detach().double().abs().sum())

    before = total()
    with torch.no_grad():
        layer.lora_magnitude_vector.mul_(1.003)
    assert total() / before == pytest.approx(1.003, abs=1e-3)
    layer(x).float().sum().backward()
    assert layer.lora_magnitude_vector.grad is not None and layer.lora_magnitude_vector.grad.dtype == torch.float32


def test_peft_reads_our_file_and_we_read_theirs(tmp_path: Path) -> None:
    """Guards the names: PEFT drops a name that it does not know without a word."""
    model, base = _trained()
    layers = [module for module in model.modules() if isinstance(module, DoraLinear)]
    wanted = _logits(model)
    method = Dora.apply(other := tiny_llama(), SETTINGS, seed=1)
    method._copy_in({peft_name(n): p for n, p in model.named_parameters() if p.requires_grad}, where="test")
    method.files("base").write(tmp_path)
    theirs = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
    assert torch.allclose(_logits(other), wanted, atol=1e-5)
    assert torch.allclose(_logits(theirs.get_base_model()), wanted, atol=1e-5)
    theirs.save_pretrained(tmp_path / "theirs")
    again = load_adapter(copy.deepcopy(base), tmp_path / "theirs")
    assert isinstance(again, Dora) and torch.allclose(_logits(again.model), wanted, atol=1e-5) and len(layers) == 14


def test_a_lost_magnitude_vector_is_an_error(tmp_path: Path) -> None:
    """Guards against an adapter that silently starts with the wrong lengths."""
    Dora.apply(model := tiny_llama(), SETTINGS, seed=1).files("base").write(tmp_path)
    tensors = load_file(tmp_path / ADAPTER_WEIGHTS)
    lost = next(name for name in tensors if name.endswith("lora_magnitude_vector"))
    del tensors[lost]
    save_file(tensors, tmp_path / ADAPTER_WEIGHTS)
    with pytest.raises(UserError, match="magnitude"):
        load_adapter(tiny_llama(), tmp_path)
    assert Lora.reads({"peft_type": "LORA"}) and not Lora.reads({"peft_type": "LORA", "use_dora": True}) and model


def test_the_merged_weight_is_what_the_layer_computes() -> None:
    """Guards the merge against the forward pass and against the independent change of the weight."""
    model, base = _trained()
    wanted = _logits(model)
    changes = {
        name: module.weight_change(slice(None)).float()
        for name, module in model.named_modules()
        if isinstance(module, DoraLinear)
    }
    directions = {name: layer.change_direction() for name, layer in model.named_modules() if name in changes}
    method = Dora.__new__(Dora)
    method.model = model
    method.merge()
    assert torch.allclose(_logits(model), wanted, atol=1e-5)
    for name, change in changes.items():
        difference = model.get_submodule(name).weight - base.get_submodule(name).weight
        assert torch.allclose(difference, change, atol=1e-6), name
        largest = torch.linalg.matrix_norm(change.double(), 2)
        found = directions[name]
        assert found is not None and float((change.double() @ found).norm()) > 0.95 * float(largest), name


def test_a_row_of_zeros_stays_finite_in_the_merge() -> None:
    """Pruned models have such rows. They trained well, and the merge was refused because of NaN."""
    linear = torch.nn.Linear(8, 4, bias=False).requires_grad_(False)
    linear.weight[1] = 0
    layer = DoraLinear(linear, rank=2, scale=1.0, dropout=0.0)
    layer.reset_parameters(torch.Generator().manual_seed(0))
    x = torch.randn(3, 8)
    wanted = layer(x).detach()
    assert wanted.isfinite().all() and layer.weight_change(slice(None)).isfinite().all()
    assert torch.allclose(layer.merged()(x), wanted, atol=1e-6)


def test_the_norms_follow_every_update() -> None:
    """Guards against norms of an earlier step: fused AdamW changes parameters without a new version."""
    learner, documents = lora_learner(method=SETTINGS), RandomDocuments()
    for number in range(3):
        learner.take_step(documents.batches(list(range(8)), 400), number=number, rate=1e-1)
    learner.loss_sum(make_batch(documents, [0]))
    for layer in (module for module in learner.model.modules() if isinstance(module, DoraLinear)):
        raised = layer.base_layer.weight + layer.scale * layer.lora_B @ layer.lora_A
        assert torch.allclose(layer.norms(), raised.norm(dim=1), rtol=1e-4)
