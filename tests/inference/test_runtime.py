"""Losses, answers and logits as plain transformers gives them, document by document and prompt by prompt."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lessons import VOCABULARY, RandomDocuments, lora_learner, tiny_llama
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import GenerationConfig, LlamaForCausalLM

from tunewell.inference import runtime as measuring
from tunewell.inference.runtime import (
    DocumentLosses,
    TextDocuments,
    TorchRuntime,
    last_logits,
    measure_losses,
    nonfinite_weights_in,
)
from tunewell.methods.base import trainable_parameters
from tunewell.models.packed_forward import PackedModel

STOPS = [5, 17]
NEW_TOKENS = 24


def prompts_of(number: int) -> list[list[int]]:
    draw = np.random.default_rng(3)
    return [draw.integers(20, VOCABULARY, int(draw.integers(1, 30))).tolist() for _ in range(number)]


def by_transformers(model: Any, prompt: list[int]) -> tuple[list[int], bool]:
    settings = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=STOPS, pad_token_id=0)
    ids = torch.tensor([prompt])
    written = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    words = written[0, len(prompt) :].tolist()
    return (words[:-1], True) if words[-1] in STOPS else (words, False)


@pytest.fixture(scope="module")
def models() -> dict[str, tuple[Any, Any]]:
    """Ours, and what plain transformers and PEFT make of the same weights."""
    bare = tiny_llama(seed=4)
    plain = LlamaForCausalLM(bare.config).eval()
    plain.set_attn_implementation("sdpa")
    plain.load_state_dict(bare.state_dict())
    learner = lora_learner(tiny_llama(seed=4))
    twin = LlamaForCausalLM(bare.config).eval()
    twin.set_attn_implementation("sdpa")
    twin.load_state_dict(plain.state_dict())
    tuned = get_peft_model(twin, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")).eval()
    theirs = dict(tuned.named_parameters())
    with torch.no_grad():
        for name, parameter in trainable_parameters(learner.model).items():
            found = f"base_model.model.{name}.default.weight"
            theirs[found].copy_(parameter)
    return {"bare": (bare, plain), "adapter": (learner.model, tuned)}


@pytest.fixture(scope="module")
def answers(models: Any) -> dict[str, list[tuple[list[int], bool]]]:
    """What plain transformers answers to each prompt alone."""
    return {
        kind: [by_transformers(theirs, prompt) for prompt in prompts_of(40)] for kind, (_, theirs) in models.items()
    }


@pytest.mark.parametrize("batch_size", [pytest.param(1, marks=pytest.mark.slow), 8, None])
@pytest.mark.parametrize("kind", ["bare", "adapter"])
def test_answers_are_those_of_transformers_token_for_token(
    models: Any, answers: Any, kind: str, batch_size: int | None
) -> None:
    """Forty prompts of many lengths; in a batch each is answered as if it were alone."""
    ours, expected = models[kind][0], answers[kind]
    prompts = prompts_of(40)
    runtime = TorchRuntime(ours, "fp32")
    found = runtime.generate(prompts, max_new_tokens=NEW_TOKENS, stop_ids=STOPS, batch_size=batch_size)
    assert [(answer.ids, answer.ended) for answer in found] == expected
    assert len({ended for _, ended in expected}) == 2, "some must end and some must not"


@pytest.mark.parametrize("kind", ["bare", "adapter"])
@pytest.mark.parametrize("budget", [64, 4096])
def test_losses_are_those_of_transformers(models: Any, kind: str, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several documents in one micro-batch do not see each other, and each loss goes to its own document."""
    ours, theirs = models[kind]
    monkeypatch.setattr(measuring, "_BATCH_TOKENS", budget)
    documents = RandomDocuments(20, seed=2)
    told: list[tuple[int, int]] = []
    found = measure_losses(
        PackedModel(ours, "fp32", 40), documents, most=None, progress=lambda at: told.append((at.done, at.total))
    )
    for index, (ids, labels) in enumerate(documents.rows):
        with torch.no_grad():
            out = theirs(input_ids=torch.tensor(ids)[None].long(), labels=torch.tensor(labels)[None].long())
        assert found.sums[index] / found.tokens[index] == pytest.approx(float(out.loss), abs=1e-5)
        assert found.tokens[index] == documents.index["supervised"][index]
    assert told[-1] == (20, 20) and len(told) == 1 if budget == 4096 else len(told) > 3
    assert len(measure_losses(PackedModel(ours, "fp32", 40), documents, most=7).documents) == 7


def test_losses_are_measured_in_smaller_batches_when_memory_is_short(models: Any, monkeypatch: Any) -> None:
    """A verdict after hours of training must not end because its batches are larger than those of the steps."""
    packed, documents = PackedModel(models["bare"][0], "fp32", 40), RandomDocuments(20, seed=2)
    expected = measure_losses(packed, documents, most=None)
    sizes, compute = [], packed.token_losses

    def token_losses(batch: Any) -> Any:
        sizes.append(int(sum(batch.lengths)))
        if sizes[-1] > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return compute(batch)

    monkeypatch.setattr(packed, "token_losses", token_losses)
    limit = 100
    found = measure_losses(packed, documents, most=None, batch_tokens=4096)
    assert sum(size > limit for size in sizes) in (2, 3, 4) and max(sizes) > 300, "half as much after each failure"
    np.testing.assert_allclose(found.sums, expected.sums, rtol=1e-5)
    assert (found.tokens == expected.tokens).all()
    limit = 2
    with pytest.raises(torch.OutOfMemoryError):
        measure_losses(packed, documents, most=None)


def test_means_of_parts_add_up_to_the_mean_of_the_whole() -> None:
    measured = DocumentLosses(np.arange(4), np.array([1.0, 2.0, 3.0, 8.0]), np.array([1, 2, 3, 2]))
    first = np.array([True, False, True, False])
    assert measured.mean() == 14 / 8 and measured.mean(first) == 4 / 4 and measured.mean(~first) == 10 / 4
    assert np.isnan(measured.mean(np.zeros(4, dtype=bool)))


def test_logits_of_the_next_token_are_the_models_own(models: Any) -> None:
    ours, theirs = models["adapter"]
    prompts = prompts_of(5)
    found = np.concatenate(last_logits(ours, prompts))
    for row, prompt in zip(found, prompts, strict=True):
        with torch.no_grad():
            own = theirs(input_ids=torch.tensor([prompt])).logits[0, -1].numpy()
        np.testing.assert_allclose(row, own, atol=1e-4)


def test_texts_are_documents_whose_first_token_is_given() -> None:
    texts = TextDocuments([[1, 2, 3], [4], [5, 6, 7, 8]], longest=3)
    assert len(texts) == 2 and texts.index["length"].tolist() == [3, 3]
    assert [part.tolist() for part in texts.arrays(1)] == [[5, 6, 7], [-100, 6, 7]]


def test_values_that_are_not_finite_are_counted_by_tensor(tmp_path: Path) -> None:
    model = tiny_llama()
    assert TorchRuntime(model, "fp32").nonfinite_weights() == {}
    with torch.no_grad():
        model.model.norm.weight[:3] = torch.inf
        model.lm_head.weight[1, 1] = torch.nan
    assert TorchRuntime(model, "fp32").nonfinite_weights() == {"model.norm.weight": 3, "lm_head.weight": 1}
    tensors = {"a": torch.tensor([1.0, torch.nan]).bfloat16(), "b": torch.ones(2), "c": torch.ones(2).long()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert nonfinite_weights_in(tmp_path) == {"a": 1} and nonfinite_weights_in(tmp_path / "nowhere") == {}
