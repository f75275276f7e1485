"""An opened model: its stop tokens, its precision, and its base model."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from family_templates import CHANNELS
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from parrots import END, write_parrot, write_random
from tunewell.core.errors import UserError
from tunewell.inference.chat_model import open_chat_model, open_without_weights
from tunewell.inference.decoder import GREEDY
from tunewell.inference.runtime import last_logits
from tunewell.inference.stream import sample_tokens
from tunewell.runs.resolve import resolve_model

PROMPTS = [[7, 8, 9, 10, 11], [12, 13]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    return write_random(tmp_path_factory.mktemp("voice") / "model", tiny_model)


def peft_adapter(folder: Path, model: Path, **more) -> Path:
    tuned = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **more)
    )
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    tuned.save_pretrained(str(folder))
    return folder


def logits(model: PreTrainedModel) -> np.ndarray:
    return np.concatenate(last_logits(model, PROMPTS))


def test_a_voice_is_frozen_in_eval_mode_and_stops_at_the_end_of_a_turn(model: Path) -> None:
    voice = open_chat_model(resolve_model(model), device="cpu")
    assert voice.tokenizer.backend.token_to_id(END) in voice.stop_ids
    assert not voice.model.training and not any(p.requires_grad for p in voice.model.parameters())
    assert voice.precision == "fp32" and voice.masker is not None and not voice.has_base
    assert voice.decode(voice.tokenizer.backend.encode("Hello", add_special_tokens=False).ids) == "Hello"


def test_the_makers_own_end_is_one_too(tmp_path: Path, tiny_model: Path) -> None:
    folder = write_parrot(tmp_path / "parrot", tiny_model, "Yes")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert {3, 4} < set(open_chat_model(resolve_model(folder), device="cpu").stop_ids)


def test_switched_off_an_adapter_is_its_base(model: Path, tmp_path: Path) -> None:
    folder = peft_adapter(tmp_path / "adapter", model)
    voice = open_chat_model(resolve_model(folder), device="cpu", with_base=True)
    assert voice.can_disable_adapter and voice.has_base
    own = AutoModelForCausalLM.from_pretrained(model)
    with voice.base_runtime() as base:
        assert base.model is voice.model and np.allclose(logits(base.model), logits(own), atol=1e-5)
    assert not np.allclose(logits(voice.model), logits(own), atol=1e-2)


def test_an_adapter_with_a_whole_module_of_its_own_needs_its_base_apart(model: Path, tmp_path: Path) -> None:
    """The head it brings is not switched off with its matrices."""
    folder = peft_adapter(tmp_path / "adapter", model, modules_to_save=["lm_head"])
    voice = open_chat_model(resolve_model(folder), device="cpu", with_base=True)
    assert not voice.can_disable_adapter and voice.has_base
    with voice.base_runtime() as base:
        assert base.model is not voice.model
        assert np.allclose(logits(base.model), logits(AutoModelForCausalLM.from_pretrained(model)), atol=1e-5)


def test_all_but_the_model_is_known_of_one_that_cannot_be_loaded(model: Path) -> None:
    voice = open_without_weights(resolve_model(model), device="cpu")
    assert voice.tokenizer.vocab_size == 500 and voice.precision == "fp32"


def test_a_model_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        open_chat_model(resolve_model(tmp_path / "nowhere"), device="cpu")
    assert "nowhere" in str(error.value)


def test_an_answer_goes_on_after_its_thinking(tiny_model, tmp_path):
    """Guards against a stop at the marker that ends a part: the user would see thinking, and no answer."""
    (tmp_path / "channels.jinja").write_text(CHANNELS, encoding="utf-8")
    place = write_random(tmp_path / "model", tiny_model)
    template, sets = str(tmp_path / "channels.jinja"), ["template.add_missing_tokens=true"]
    model = open_without_weights(resolve_model(place, template=template, sets=sets))
    said = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    backend = model.tokenizer.backend
    script = iter(backend.encode(f"{said}<|return|>!!!", add_special_tokens=False).ids)

    def next_logits(_: Sequence[int]) -> torch.Tensor:
        logits = torch.zeros(1, backend.get_vocab_size())
        logits[0, next(script)] = 1
        return logits

    answer = [*sample_tokens(next_logits, [1], GREEDY, model.stop_ids, max_new=99, num_free=99)]
    assert model.decode(answer) == said
