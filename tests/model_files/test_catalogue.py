"""The catalogue of models, and what is suggested for a name that does not exist."""

import dataclasses
import datetime
import re

import pytest

from tunewell.core.errors import UserError
from tunewell.model_files.catalogue import catalogue, close_models, find_in_catalogue
from tunewell.model_files.families import packing_of
from tunewell.model_files.files import locate
from tunewell.model_files.shape import shape_of_config

# Parameters as the model cards state them, in millions.
CARDS = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134.5,
    "HuggingFaceTB/SmolLM2-360M-Instruct": 361.8,
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": 1711,
    "HuggingFaceTB/SmolLM3-3B": 3075,
    "Qwen/Qwen3-0.6B": 596,
    "Qwen/Qwen3-4B-Instruct-2507": 4022,
    "Qwen/Qwen3-8B": 8191,
    "Qwen/Qwen2.5-0.5B-Instruct": 494,
    "Qwen/Qwen2.5-1.5B-Instruct": 1544,
    "meta-llama/Llama-3.2-1B-Instruct": 1236,
    "meta-llama/Llama-3.2-3B-Instruct": 3213,
    "meta-llama/Llama-3.1-8B-Instruct": 8030,
    "google/gemma-3-270m-it": 268.1,
    "google/gemma-3-1b-it": 1000,
    "microsoft/Phi-4-mini-instruct": 3836,
}


def test_the_shapes_give_the_parameters_of_the_cards():
    """A wrong width in the data file would make every prediction for that model wrong."""
    for name, millions in CARDS.items():
        model = find_in_catalogue(name)
        assert model is not None
        assert model.num_parameters / 1e6 == pytest.approx(millions, rel=0.005), name
        assert shape_of_config(model.config).num_weights == pytest.approx(model.num_parameters, rel=0.001)


def test_every_entry_is_complete_and_unique():
    names = [model.name for model in catalogue()]
    assert len(names) == len(set(names)) == 40
    for model in catalogue():
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", model.name)
        assert model.kind in ("chat", "base") and model.license and model.good_for and "en" in model.languages
        assert 134e6 < model.num_parameters < 22e9 and model.context >= 4096
        assert len(model.languages) <= model.num_languages
        assert model.source and datetime.date.fromisoformat(model.read) >= datetime.date(2026, 11, 17)
        facts = {field.name for field in dataclasses.fields(model)} | set(model.config)
        assert set(model.unverified) <= facts, "unverified names a fact of the row"
        is_address = re.search(r"https://[\w.-]+/\S+", model.source) is not None
        assert is_address or model.unverified or "second list" in model.source, "its source cannot be found again"


def test_every_entry_has_a_level_and_a_size_near_that_of_its_card():
    """A family that is refused, or a wrong width, would make the comparison wrong."""
    for model in catalogue():
        assert packing_of(model.config).level
        counted = shape_of_config(model.config).num_weights
        assert 0.3 < counted / model.num_parameters < 1.6, model.name


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("llama3.2", "meta-llama/Llama-3.2-3B-Instruct"),
        ("Qwen/Qwen3-06B", "Qwen/Qwen3-0.6B"),
        ("HuggingFaceTB/SmolLM2-135M-Intruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("SmolLM-135M", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("qwen3:4b", "Qwen/Qwen3-4B-Instruct-2507"),
        ("gemma3", "google/gemma-3-1b-it"),
    ],
)
def test_a_wrong_name_suggests_the_nearest(wrong: str, meant: str):
    assert meant in close_models(wrong)


@pytest.mark.parametrize("name", ["bert-base-uncased", "gpt2", "x", "mistral"])
def test_a_name_like_none_suggests_nothing(name: str):
    """A wrong suggestion is worse than none."""
    assert close_models(name) == []


def test_a_model_that_does_not_exist_names_the_nearest(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """`--model llama3.2` is what users of Ollama write first."""
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    with pytest.raises(UserError) as caught:
        locate("llama3.2")
    assert "meta-llama/Llama-3.2-3B-Instruct" in str(caught.value.fix)
    monkeypatch.setattr("tunewell.model_files.files.hub_is_out_of_reach", lambda: "offline")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError) as caught:
        locate("Qwen/Qwen3-06B")
    assert "`Qwen/Qwen3-0.6B`" in str(caught.value.fix)
    with pytest.raises(UserError) as caught:
        locate("Qwen/Qwen3-0.6B")  # the name is right: the network is the problem
    assert "did you mean" not in str(caught.value.fix)
