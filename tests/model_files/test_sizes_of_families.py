"""The size of a model, read without torch: exact where its weights are, and within 3% from its config alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tunewell.core.files import read_data
from tunewell.model_files import shape
from tunewell.model_files.facts import read_facts

KNOWN = [
    "apertus",
    "arcee",
    "biogpt",
    "bitnet",
    "bloom",
    "codegen",
    "cohere",
    "cohere2",
    "exaone4",
    "falcon",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "gpt_neox",
    "gpt_oss",
    "gptj",
    "granite",
    "granitemoe",
    "helium",
    "jais2",
    "llama",
    "minimax",
    "mistral",
    "mixtral",
    "mpt",
    "nanochat",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "opt",
    "phi",
    "phi3",
    "phimoe",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
    "stablelm",
    "starcoder2",
    "vaultgemma",
    "xglm",
]


def parameters(config: Any) -> dict[str, list[int]]:
    """Return the shape of each parameter of a model that holds no memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: list(parameter.shape) for name, parameter in model.named_parameters()}


def size(shapes: dict[str, list[int]]) -> int:
    return sum(torch.Size(own).numel() for own in shapes.values())


def written(folder: Path, config: Any) -> Path:
    (folder / "config.json").write_text(config.to_json_string(use_diff=False))
    return folder


@pytest.mark.parametrize("kind", KNOWN)
def test_the_size_follows_from_the_config(kind: str, tmp_path: Path) -> None:
    """`init` called the size of most families unknown, and gave them the rate of several billion parameters."""
    config = CONFIG_MAPPING[kind]()
    found = read_facts(written(tmp_path, config)).num_parameters
    assert found == pytest.approx(size(parameters(config)), rel=0.03)


@pytest.mark.parametrize("kind", ["mamba2", "qwen2_moe", "jamba", "lfm2", "gpt2", "gemma", "deepseek_v3", "falcon_h1"])
def test_the_size_is_counted_in_the_headers_of_the_weights(kind: str, tmp_path: Path) -> None:
    """A config does not say how large a state space is; the 8 bytes and the JSON before the weights do."""
    shapes = parameters(config := CONFIG_MAPPING[kind]())
    entries = {name: {"dtype": "F32", "shape": own, "data_offsets": [0, 0]} for name, own in shapes.items()}
    entries["model.layers.0.self_attn.rotary_emb.inv_freq"] = {"dtype": "F32", "shape": [64], "data_offsets": [0, 0]}
    header = json.dumps(entries).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert read_facts(written(tmp_path, config)).num_parameters == size(shapes)


def test_no_size_is_guessed_from_a_config_that_does_not_say_it(tmp_path: Path) -> None:
    """Guards families of which the shape is more than attention and a feed-forward block."""
    for kind in ("mamba2", "zamba2", "mamba", "rwkv"):
        assert read_facts(written(tmp_path, CONFIG_MAPPING[kind]())).num_parameters is None
    unsized = read_data(shape.__file__, "families.toml")["unsized"].split()
    assert not {*unsized} & {*KNOWN}
