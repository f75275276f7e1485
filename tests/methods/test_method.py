"""A training method is one class and one registry entry: a toy method trains, saves, restores and resets."""

import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Self

import pytest
import torch
from lessons import tiny_llama
from tiny_runs import make_run
from torch import Tensor
from transformers import PreTrainedModel

from tunewell.config.extensions import METHODS, MethodEntry
from tunewell.config.prices import Activations, no_weights
from tunewell.config.schema import MethodSettings
from tunewell.methods.base import Method, MethodFiles, trainable_parameters
from tunewell.methods.full import Full
from tunewell.methods.lora import Lora, LoraLinear
from tunewell.training.engine import train


class NormsOnly(Method):
    """Trains the norms."""

    @classmethod
    def load_dtype(cls, precision: torch.dtype) -> torch.dtype:
        return precision

    @classmethod
    def apply(cls, model: PreTrainedModel, settings: MethodSettings, *, seed: int, **_: object) -> Self:
        model.requires_grad_(False)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name)
        return cls(model, [])

    def files(self, base_model: str | None) -> MethodFiles:
        tensors = {name: parameter.detach() for name, parameter in trainable_parameters(self.model).items()}
        return MethodFiles({"norms.safetensors": tensors}, {})

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        for name, parameter in trainable_parameters(self.model).items():
            parameter.copy_(tensors["norms.safetensors"][name])


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("toy_methods")
    module.NormsOnly = NormsOnly  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "toy_methods", module)
    monkeypatch.setattr(METHODS, "_entries", dict(METHODS._entries))
    cost = {"trains": no_weights, "activations": Activations(8, 2, 2, 4)}
    METHODS.add(
        MethodEntry("norms", "only the norms", "toy_methods:NormsOnly", "norm tuning", is_adapter=False, **cost)
    )


def test_a_run_trains_and_saves_with_a_method_from_outside(tmp_path: Path, toy: None) -> None:
    """The engine must not know which methods there are."""
    run = make_run(tmp_path / "run", config={"method": {"kind": "norms"}}, plan={"method": "norms"})
    before = {name: tensor.clone() for name, tensor in run.method.model.state_dict().items()}
    assert train(run).status == "finished"
    after = run.method.model.state_dict()
    assert {name for name in before if not torch.equal(before[name], after[name])} == set(run.learner.parameters)
    assert list(tmp_path.glob("run/checkpoints/*/norms.safetensors"))


@pytest.mark.parametrize("kind", METHODS.names())
def test_a_method_restores_what_it_saved_and_resets_to_its_beginning(kind: str) -> None:
    model = tiny_llama()
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    method = METHODS.load(kind).apply(model, MethodSettings(kind=kind, rank=4), seed=3)
    first = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in trainable_parameters(model).values():
            parameter.add_(1.0)
    saved = {
        file: {name: t.clone() for name, t in tensors.items()} for file, tensors in method.files(None).tensors.items()
    }
    method.reset(weights)
    assert all(torch.equal(parameter, first[name]) for name, parameter in model.named_parameters())
    method.restore(saved)
    for name, parameter in trainable_parameters(model).items():
        assert torch.equal(parameter, first[name] + 1.0)


def test_full_loads_in_fp32_and_lora_in_the_precision_of_the_run() -> None:
    assert Full.load_dtype(torch.bfloat16) == torch.float32
    assert Lora.load_dtype(torch.bfloat16) == torch.bfloat16


def test_a_layer_that_computes_its_own_product_keeps_it_below_an_adapter() -> None:
    """A quantised layer has no plain weight; its forward must be called."""

    class Doubling(torch.nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    base = Doubling(4, 3)
    layer = LoraLinear(base, rank=2, scale=0.5, dropout=0.0)
    layer.reset_parameters(torch.Generator().manual_seed(0))
    x = torch.randn(5, 4)
    assert torch.equal(layer(x), base(x))
    torch.nn.init.ones_(layer.lora_B)
    torch.testing.assert_close(layer(x), base(x) + 0.5 * x @ layer.lora_A.T @ layer.lora_B.T)
