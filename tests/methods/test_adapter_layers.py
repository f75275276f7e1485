"""A method means layers that are there, each for one purpose, and says what it leaves out."""

import pytest
from lessons import tiny_llama
from tiny_models import tiny

from tunewell.config.schema import MethodSettings
from tunewell.core.errors import UserError
from tunewell.methods.lora import Lora
from tunewell.methods.targets import expert_notes


def test_a_layer_that_is_not_there_is_refused_with_those_that_are() -> None:
    """Of `[1, 7]` the 7 was left out without a word."""
    with pytest.raises(UserError, match="no layer 7") as refused:
        Lora.apply(tiny_llama(), MethodSettings(layers=(1, 7)), seed=0)
    assert "0 to 1" in str(refused.value.fix)
    Lora.apply(tiny_llama(), MethodSettings(layers=(1,)), seed=0)


@pytest.mark.parametrize(
    "method",
    [
        MethodSettings(targets=("q_proj",), modules_to_save=("q_proj",)),
        MethodSettings(targets=("q_proj", "v_proj"), modules_to_save=("q_proj",)),
        MethodSettings(targets=("q_proj", "down_proj"), modules_to_save=("mlp",)),
    ],
)
def test_what_is_trained_as_a_whole_cannot_get_matrices_too(method: MethodSettings) -> None:
    """PEFT refuses such an adapter, or leaves the matrices out."""
    with pytest.raises(UserError, match="cannot both get an adapter"):
        Lora.apply(tiny_llama(), method, seed=0)


def test_a_module_without_weights_cannot_be_trained() -> None:
    with pytest.raises(UserError, match=r"`model\.rotary_emb` has no weights"):
        Lora.apply(tiny_llama(), MethodSettings(modules_to_save=("rotary_emb",)), seed=0)


def test_something_must_be_left_for_matrices() -> None:
    with pytest.raises(UserError, match="no linear layer is left"):
        Lora.apply(tiny_llama(), MethodSettings(modules_to_save=("self_attn", "mlp")), seed=0)


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        ("mixtral", ("experts.gate_up_proj`", "experts.down_proj`")),
        ("qwen3_moe", ("`mlp.experts.gate_up_proj`",)),
        ("deepseek_v3", ("`mlp.experts.down_proj`",)),
    ],
)
def test_experts_that_get_no_matrices_are_named(kind: str, kept: tuple[str, ...]) -> None:
    """They are most of such a model, and `all-linear` sounded as if they were trained."""
    (note,) = expert_notes(tiny(kind), MethodSettings())
    assert all(name in note for name in kept) and "% of its weights" in note


def test_a_model_without_experts_has_nothing_left_out() -> None:
    assert expert_notes(tiny_llama(), MethodSettings()) == []
    assert expert_notes(tiny("mixtral"), MethodSettings(targets=("q_proj",))) == []
