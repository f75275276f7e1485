"""Merged models of multimodal folders: complete folders, whose other towers keep every byte."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tiny_models import tiny  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForImageTextToText, Gemma3nConfig, Mistral3Config, Qwen3_5Config, Qwen3VLConfig

from tunewell.config.extensions import METHODS
from tunewell.config.schema import MethodSettings
from tunewell.export.multimodal import changed_towers, find_multimodal_folder, missing_names, write_multimodal
from tunewell.export.targets.merged import unique_tensors
from tunewell.models.load import LoadedModel, LoadOptions, load_model

TEXT = {
    "vocab_size": 500, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "pad_token_id": 0,
}  # fmt: skip
TOWER = {"hidden_size": 16, "intermediate_size": 24, "depth": 1, "num_heads": 2, "out_hidden_size": 32}
TOWER |= {"patch_size": 14, "num_position_embeddings": 16}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
CONFIGS = {
    "mistral3": Mistral3Config(
        text_config=TEXT | {"model_type": "mistral"},
        vision_config={"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
        | {"num_attention_heads": 2, "head_dim": 8, "image_size": 28, "patch_size": 14},
    ),
    "qwen3_vl": Qwen3VLConfig(
        text_config=TEXT | {"rope_parameters": ROPE}, vision_config=TOWER | {"deepstack_visual_indexes": [0]}
    ),
    "qwen3_5": Qwen3_5Config(
        text_config=TEXT | LINEAR | {"layer_types": ["linear_attention", "full_attention"]}, vision_config=TOWER
    ),
}
IDS = torch.tensor([[5, 17, 499, 3, 42, 8, 61]])


@pytest.fixture(params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Save a tiny random multimodal model with transformers' own class, in several files."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(CONFIGS[request.param]).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "base", max_shard_size="20KB")
    (tmp_path / "base" / "preprocessor_config.json").write_text('{"size": 28}')
    return tmp_path / "base"


def load(folder: Path, tokenizer: Path, *, is_whole: bool = False) -> LoadedModel:
    device, dtype = torch.device("cpu"), torch.float32
    options = LoadOptions(str(folder), tokenizer, device, dtype, attention=None, is_packed=False, is_whole=is_whole)
    return load_model(options)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits.float()


def test_the_text_part_gives_the_logits_of_the_whole_model(folder, tiny_model):
    """A wrong name, a head tied in one of them only, or other positions would change them."""
    found = load(folder, tiny_model)
    assert any("only the text part" in note for note in found.notes)
    whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(logits(found.model), logits(whole), rtol=1e-5, atol=1e-5)


def test_a_merged_folder_is_complete_and_its_other_towers_are_unchanged(folder, tiny_model, tmp_path):
    """Users of the folder expect images to work as before, and text as trained."""
    text, base = load(folder, tiny_model).model, find_multimodal_folder(str(folder))
    assert base is not None and len(base.weight_files) > 1
    with torch.no_grad():
        for parameter in text.parameters():
            parameter.mul_(1.01)
    tensors = unique_tensors(text)
    assert missing_names(base, tensors) == []
    write_multimodal(base, tensors, tmp_path / "merged", torch.float32)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits(again), logits(text), rtol=1e-5, atol=1e-5)
    assert changed_towers(base, tmp_path / "merged", tensors) == []
    assert (tmp_path / "merged" / "preprocessor_config.json").read_text() == '{"size": 28}'
    before, after = ({file.name for file in path.glob("*.safetensors*")} for path in (folder, tmp_path / "merged"))
    assert before == after


def test_a_changed_tower_is_found(folder, tiny_model, tmp_path):
    base, text = find_multimodal_folder(str(folder)), load(folder, tiny_model).model
    assert base is not None
    tensors = unique_tensors(text)
    write_multimodal(base, tensors, tmp_path / "merged", torch.bfloat16)
    name, path = next((name, path) for name, path in base.names().items() if base.text_name(name) not in tensors)
    weights = load_file(tmp_path / "merged" / path.name)
    weights[name] = weights[name] + 1
    save_file(weights, tmp_path / "merged" / path.name, metadata={"format": "pt"})
    assert changed_towers(base, tmp_path / "merged", tensors) == [name]


def test_peft_loads_an_adapter_on_the_whole_model(folder, tiny_model, tmp_path):
    """Its names must be those of the class that loads the folder."""
    found = load(folder, tiny_model)
    method = METHODS.load("lora").apply(
        found.model, MethodSettings(rank=4, alpha=8), seed=1, text_prefix=found.text_prefix
    )
    for name, parameter in found.model.named_parameters():
        if name.endswith("lora_B"):
            torch.nn.init.normal_(parameter, std=0.05)
    (tmp_path / "adapter").mkdir()
    method.files(str(folder)).write(tmp_path / "adapter")
    whole = load(folder, tiny_model, is_whole=True).model
    assert not torch.allclose(logits(found.model), logits(whole), atol=1e-3)
    adapted = PeftModel.from_pretrained(whole, tmp_path / "adapter")
    torch.testing.assert_close(logits(adapted), logits(found.model), rtol=1e-5, atol=1e-5)


def test_gemma_3n_is_written_back_without_its_towers_being_built(tiny_model, tmp_path):
    """Its towers need other packages, so their weights stand in by name. New tokens are in the config."""
    base = tmp_path / "base"
    text = tiny("gemma3n_text", vocab_size=500, vocab_size_per_layer_input=500)
    whole = Gemma3nConfig(text_config=text.config.to_dict())
    whole.architectures = ["Gemma3nForConditionalGeneration"]
    whole.save_pretrained(base)
    weights = {
        name.replace("model.", "model.language_model.", 1): tensor.clone()
        for name, tensor in text.state_dict().items()
        if name != "lm_head.weight"
    }
    towers = {"model.vision_tower.x.weight": torch.ones(3), "model.audio_tower.x.weight": torch.ones(3).half()}
    save_file(weights | towers, base / "model.safetensors", metadata={"format": "pt"})
    found, multimodal = load(base, tiny_model), find_multimodal_folder(str(base))
    assert multimodal is not None and found.text_prefix == "model.language_model."
    tensors = unique_tensors(found.model)
    assert missing_names(multimodal, tensors) == []
    tensors["model.embed_tokens.weight"] = torch.zeros(512, 32)
    write_multimodal(multimodal, tensors, tmp_path / "merged", torch.bfloat16)
    written = load_file(tmp_path / "merged" / "model.safetensors")
    assert written["model.audio_tower.x.weight"].dtype == torch.float16
    assert written["model.language_model.embed_tokens.weight"].shape == (512, 32)
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["text_config"]["vocab_size"] == 512 and config["model_type"] == "gemma3n"


def test_a_text_model_has_no_multimodal_folder(tiny_model):
    assert find_multimodal_folder(str(tiny_model)) is None
    assert find_multimodal_folder(None) is None
