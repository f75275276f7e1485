"""An adapter of the text part of a model that also sees is proven on what its users load: the whole model."""

import json
from pathlib import Path

import pytest
import torch
from exports import exported, rehash
from gguf_tiny import CASES, ROWS, save
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3Config

from tunewell.config.schema import MethodSettings
from tunewell.methods.base import trainable_parameters
from tunewell.methods.lora import Lora
from tunewell.models.load import LoadOptions, load_model
from tunewell.records.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tunewell.workflows.verify import verify

_SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Gemma 3 with eyes."""
    own = CASES["gemma3"][1] | _SIZES | {"layer_types": ["sliding_attention", "full_attention"]}
    text = AutoConfig.for_model(
        "gemma3_text", **own | {"vocab_size": ROWS, "intermediate_size": 48, "max_position_embeddings": 1024}
    )
    sight = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    marks = {"image_token_index": ROWS - 1, "boi_token_index": ROWS - 2, "eoi_token_index": ROWS - 3}
    config = Gemma3Config(
        text_config=text, vision_config=sight | {"image_size": 28, "patch_size": 14}, mm_tokens_per_image=4, **marks
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)
    return save(model, tmp_path_factory.mktemp("sees") / "base")


def test_it_is_proven_on_the_whole_model_and_on_nothing_less(tmp_path: Path, base: Path) -> None:
    """Written for the text part alone, it did nothing in PEFT, and was called proven."""
    cpu = torch.device("cpu")
    model = load_model(LoadOptions(str(base), base, cpu, torch.float32, attention="sdpa")).model
    # As tunewell once named them: for the part alone.
    adapter = Lora.apply(model, MethodSettings(rank=4, alpha=8), seed=0)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in trainable_parameters(model).values():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    place = tmp_path / "adapter"
    place.mkdir()
    adapter.files(str(base)).write(place)

    out = tmp_path / "out"
    done = exported(place, out, to=("adapter",))
    assert done.parity.is_ok, [check.words for link in done.parity.links for check in link.checks if not check.is_ok]
    written = load_file(out / "adapter" / ADAPTER_WEIGHTS)
    assert all(name.startswith("base_model.model.model.language_model.layers.") for name in written)

    for name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG):
        (out / "adapter" / name).write_bytes((place / name).read_bytes())
    rehash(out, only="adapter fp32")
    failed = {check.name for link in verify(out).links for check in link.checks if not check.is_ok}
    assert {"logits", "tensors"} <= failed
    assert json.loads((out / "parity.json").read_text())["is_ok"] is False
