"""Models from nothing: the shapes they promise, the same from the same seed."""

import pytest
import torch
from tiny_models import order
from transformers import AutoModelForCausalLM, LlamaConfig

from tunewell.core.errors import UserError
from tunewell.model_files.facts import read_facts
from tunewell.model_files.presets import PRESETS, find_preset, llama_settings
from tunewell.models.load import load_model


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_size_in_its_name(name):
    """The 23m preset is the model of the post-mortem, whose log says "23,072,000 parameters"."""
    config = LlamaConfig(**llama_settings(PRESETS[name], 32_768, {"bos_token": 1, "eos_token": 2}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    made = sum(parameter.numel() for parameter in model.parameters())
    assert made == 23_072_000 or name != "tiny-23m"
    assert f"{made / 1e6:.0f}m" == name.split("-")[1]
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, None)


def test_facts_of_a_preset_know_its_context_and_not_its_vocabulary():
    facts = read_facts("preset:tiny-23m")
    assert (facts.name, facts.context_limit, facts.hidden_size) == ("tiny-23m", 1024, 256)
    assert (facts.vocab_size, facts.num_parameters) == (None, None)


def test_an_unknown_preset_names_the_nearest_and_all():
    with pytest.raises(UserError, match="no preset `tiny-32m`") as caught:
        find_preset("preset:tiny-32m")
    assert "did you mean `preset:tiny-23m`?" in str(caught.value.fix)
    assert "`preset:base-277m`" in str(caught.value.fix)
    with pytest.raises(UserError, match="no preset"):
        read_facts("preset:gigantic")


def test_a_seed_means_the_same_model_in_every_precision_and_leaves_the_dice_alone(tiny_model):
    before = torch.get_rng_state()
    first = load_model(order("preset:tiny-1m", tiny_model, seed=3)).model
    again = load_model(order("preset:tiny-1m", tiny_model, seed=3, dtype=torch.bfloat16)).model
    other = load_model(order("preset:tiny-1m", tiny_model, seed=4)).model
    assert torch.equal(torch.get_rng_state(), before)
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter.to(torch.bfloat16), again.get_parameter(name))
    assert not torch.equal(first.model.layers[0].mlp.up_proj.weight, other.model.layers[0].mlp.up_proj.weight)


def test_a_preset_has_the_vocabulary_and_the_special_tokens_of_the_tokenizer(tiny_model, tmp_path):
    loaded = load_model(order("preset:tiny-1m", tiny_model))
    config = loaded.model.config
    assert (config.vocab_size, config.eos_token_id, config.pad_token_id, config.bos_token_id) == (500, 498, 499, None)
    assert loaded.notes == ["the weights are random: training starts from scratch"]
    loaded.model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again.lm_head.weight, loaded.model.lm_head.weight)
