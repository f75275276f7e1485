"""Packed attention is transformers' own, document by document, and a leak does not go unseen."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from lessons import VOCABULARY, RandomDocuments, lora_learner, tiny_llama
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma3TextConfig, MistralConfig, Qwen3Config

from tunewell.config.schema import Train
from tunewell.core.errors import UserError
from tunewell.models import attention
from tunewell.training.leak_probe import probe_leaks
from tunewell.training.step import TrainableModel

_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "initializer_range": 0.3,
}
MODELS: dict[str, Any] = {
    "windows everywhere": lambda: MistralConfig(**_SHAPE, sliding_window=7),
    "windows in some layers": lambda: Gemma3TextConfig(**_SHAPE, sliding_window=5, query_pre_attn_scalar=8),
    "softcaps": lambda: Gemma2Config(**_SHAPE, sliding_window=6, attn_logit_softcapping=3.0, query_pre_attn_scalar=8),
    "norms of queries and keys": lambda: Qwen3Config(**_SHAPE),
}


def _learner(name: str) -> TrainableModel:
    attention.register()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[name](), attn_implementation=attention.SDPA)
    return TrainableModel(model, "fp32", 40, settings=Train())


@pytest.mark.parametrize("name", MODELS)
def test_packed_documents_are_what_they_are_alone(name: str) -> None:
    """Windows bite here: the longest document is longer than every one of them."""
    probe = probe_leaks(_learner(name), RandomDocuments())
    assert probe.packed_from_alone < 1e-5 and probe.alone_from_stock < 1e-5
    assert probe.longest > 7


def test_equal_lengths_are_attended_together() -> None:
    assert attention.runs_of([9, 9, 4, 4, 4, 9]) == ((2, 9), (3, 4), (1, 9))


class _Leaky(TrainableModel):
    """Lays all documents down as one."""

    def hidden(self, batch: Any) -> Any:
        return super().hidden(replace(batch, lengths=(sum(batch.lengths),)))


class _Shifted(TrainableModel):
    """Cuts documents one token late."""

    def hidden(self, batch: Any) -> Any:
        first, *others, last = (*batch.lengths, 0) if len(batch.lengths) == 1 else batch.lengths
        lengths = (first + 1, *others, last - 1) if last > 1 else batch.lengths
        return super().hidden(replace(batch, lengths=lengths))


@pytest.mark.parametrize("fault", [_Leaky, _Shifted])
def test_the_probe_refuses_planted_leaks(fault: type[TrainableModel]) -> None:
    model = tiny_llama()
    with pytest.raises(UserError, match="packed rows influence each other"):
        probe_leaks(fault(model, "fp32", 40, settings=Train()), RandomDocuments())


def test_the_probe_refuses_a_model_that_hands_no_layout_on() -> None:
    model = tiny_llama()
    learner = lora_learner(model)
    learner.model.base_model.forward = lambda **given: _without(model, given)
    with pytest.raises(UserError, match="documents cannot be packed"):
        probe_leaks(learner, RandomDocuments())


def _without(model: Any, given: dict[str, Any]) -> Any:
    given.pop("packed_runs", None)
    return type(model.base_model).forward(model.base_model, **given)


def test_stock_attention_gives_ours_back_afterwards() -> None:
    model = tiny_llama()
    with pytest.raises(ZeroDivisionError), attention.stock_attention(model):
        assert model.config._attn_implementation == "sdpa"
        raise ZeroDivisionError
    assert model.config._attn_implementation == attention.SDPA
