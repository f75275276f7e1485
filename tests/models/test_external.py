"""Checkpoints of other code: renamed by a map, whole or refused, and no code in them is run."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import logits, order, tiny
from transformers import AutoModelForCausalLM, LlamaConfig

from tunewell.core.errors import UserError
from tunewell.model_files.facts import read_facts
from tunewell.model_files.presets import PRESETS, llama_settings
from tunewell.model_files.weights import KeyMap, find_key_map
from tunewell.models.external import split_rotary_pairs
from tunewell.models.load import load_model

IDS = [5, 9, 40, 77, 3, 12, 64, 8, 30]
# As a small training script of someone's own may call its weights.
THEIRS = [
    (r"^model\.embed_tokens\.", "tok_embeddings."),
    (r"^model\.norm\.", "final_norm."),
    (r"^lm_head\.", "output."),
    (r"^model\.layers\.(\d+)\.self_attn\.(\w)_proj\.", r"blocks.\1.attn.w\2."),
    (r"^model\.layers\.(\d+)\.mlp\.(\w+)_proj\.", r"blocks.\1.ffn.\2."),
    (r"^model\.layers\.(\d+)\.input_layernorm\.", r"blocks.\1.norm1."),
    (r"^model\.layers\.(\d+)\.post_attention_layernorm\.", r"blocks.\1.norm2."),
]
BACK = {
    r"^tok_embeddings\.": "model.embed_tokens.",
    r"^final_norm\.": "model.norm.",
    r"^output\.": "lm_head.",
    r"^blocks\.(\d+)\.attn\.w(\w)\.": r"model.layers.\1.self_attn.\2_proj.",
    r"^blocks\.(\d+)\.ffn\.(\w+)\.": r"model.layers.\1.mlp.\2_proj.",
    r"^blocks\.(\d+)\.norm1\.": r"model.layers.\1.input_layernorm.",
    r"^blocks\.(\d+)\.norm2\.": r"model.layers.\1.post_attention_layernorm.",
}


def renamed(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in weights.items():
        for pattern, other in THEIRS:
            name = re.sub(pattern, other, name)
        found[name] = tensor.clone()
    return found


def preset_model(seed: int = 0):
    """A model of the preset `tiny-1m`, tied, with 500 tokens."""
    torch.manual_seed(seed)
    config = LlamaConfig(**llama_settings(PRESETS["tiny-1m"], 500, {}))
    return AutoModelForCausalLM.from_config(config).eval()


def checkpoint(folder: Path, content, **key_map) -> Path:
    path = folder / "ckpt.pt"
    torch.save(content, path)
    (folder / "ckpt.keys.json").write_text(json.dumps(key_map))
    return path


def test_a_checkpoint_is_renamed_and_gives_the_same_logits(tmp_path, tiny_model):
    model = preset_model()
    weights = renamed(model.state_dict())
    path = checkpoint(tmp_path, {"model": weights, "step": 7}, model="preset:tiny-1m", rename=BACK)
    with pytest.raises(UserError, match=r"`torch.save`") as caught:
        load_model(order(path, tiny_model))
    assert "--allow-pickle" in str(caught.value.fix)
    loaded = load_model(order(path, tiny_model, allow_pickle=True))
    assert torch.equal(logits(loaded.model, IDS), logits(model, IDS))
    facts = read_facts(path)
    assert (facts.name, facts.context_limit, facts.num_parameters) == ("ckpt", 1024, None)


def test_a_shared_table_may_be_there_once_or_twice_but_not_in_two_versions(tmp_path, tiny_model):
    model = preset_model()
    weights = model.state_dict()
    key_map = {"model": "preset:tiny-1m"}
    del weights["lm_head.weight"]
    once = load_model(order(checkpoint(tmp_path, dict(weights), **key_map), tiny_model, allow_pickle=True)).model
    assert torch.equal(logits(once, IDS), logits(model, IDS))
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    with pytest.raises(UserError, match=r"`lm_head.weight` and `model.embed_tokens.weight` differ"):
        load_model(order(checkpoint(tmp_path, dict(weights), **key_map), tiny_model, allow_pickle=True))


def test_settings_beside_the_checkpoint_are_used_and_safetensors_needs_no_permission(tmp_path, tiny_model):
    model = tiny("qwen3", vocab_size=500, tie_word_embeddings=False)
    model.config.save_pretrained(tmp_path)
    path = tmp_path / "weights.safetensors"
    save_file({f"_orig_mod.module.{name}": tensor for name, tensor in model.state_dict().items()}, path)
    assert torch.equal(logits(load_model(order(path, tiny_model)).model, IDS), logits(model, IDS))


def test_what_does_not_fit_is_named(tmp_path, tiny_model):
    weights = dict(preset_model().state_dict())
    weights["model.layers.0.attn.mask"] = torch.zeros(2)
    weights["model.norm.weight"] = torch.ones(31)
    del weights["model.layers.2.mlp.up_proj.weight"]
    path = checkpoint(tmp_path, weights, model="preset:tiny-1m")
    with pytest.raises(UserError) as caught:
        load_model(order(path, tiny_model, allow_pickle=True))
    assert "1 missing (`model.layers.2.mlp.up_proj.weight`)" in caught.value.what
    assert "1 unknown (`model.layers.0.attn.mask`)" in caught.value.what
    assert "1 with another shape (`model.norm.weight (31,) instead of (32,)`)" in caught.value.what
    assert "`ckpt.keys.json`" in str(caught.value.fix)


def test_entries_that_are_no_weights_can_be_dropped(tmp_path, tiny_model):
    weights = dict(preset_model().state_dict()) | {"model.layers.0.attn.mask": torch.zeros(2)}
    path = checkpoint(tmp_path, weights, model="preset:tiny-1m", drop=[r"\.mask$"])
    load_model(order(path, tiny_model, allow_pickle=True))


def test_two_weights_of_one_name_are_refused(tmp_path, tiny_model):
    path = checkpoint(tmp_path, {"a.x": torch.zeros(1), "b.x": torch.zeros(1)}, rename={"^[ab]": "c"})
    with pytest.raises(UserError, match=r"two weights of the checkpoint are renamed to `c.x`"):
        load_model(order(path, tiny_model, allow_pickle=True))


def test_neighbouring_rotary_pairs_become_halves(tmp_path, tiny_model):
    """Code in Meta's manner turns neighbours; the same weights then mean other positions."""
    model = tiny("llama", vocab_size=500)
    model.config.save_pretrained(tmp_path)

    def as_meta_has_it(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not re.search(r"[qk]_proj", name):
            return tensor
        heads = tensor.unflatten(0, (-1, 2, 4))
        return heads.transpose(1, 2).flatten(0, 2).contiguous()

    theirs = {name: as_meta_has_it(name, tensor) for name, tensor in model.state_dict().items()}
    path = checkpoint(tmp_path, theirs)
    wrong = load_model(order(path, tiny_model, allow_pickle=True)).model
    assert not torch.allclose(logits(wrong, IDS), logits(model, IDS), atol=1e-2)
    path = checkpoint(tmp_path, theirs, interleaved_rotary=True)
    right = load_model(order(path, tiny_model, allow_pickle=True)).model
    assert torch.equal(logits(right, IDS), logits(model, IDS))


@pytest.mark.shared
def test_the_pairs_of_a_real_llama2_c_model_are_turned_as_its_converter_does(shared_data):
    """llama2.c keeps its weights as Meta does; the folder beside it was converted and proven word for word."""
    import numpy as np
    from safetensors.torch import load_file

    raw = np.fromfile(shared_data / "stories260K" / "original" / "stories260K.bin", dtype=np.float32, offset=28)
    # Behind the embedding (512 x 64) and the first norms (5 x 64) lie the queries of five layers (64 x 64 each).
    at = 512 * 64 + 5 * 64
    queries = torch.from_numpy(raw[at : at + 5 * 64 * 64]).reshape(5, 64, 64)
    config = LlamaConfig(hidden_size=64, num_attention_heads=8)
    theirs = load_file(shared_data / "stories260K" / "hf" / "model.safetensors")
    for layer in range(5):
        name = f"model.layers.{layer}.self_attn.q_proj.weight"
        assert torch.equal(split_rotary_pairs({name: queries[layer]}, config)[name], theirs[name])


class Bomb:
    def __reduce__(self):
        return (print, ("code in a checkpoint was run",))


@pytest.mark.parametrize("content", [{"model": Bomb()}, Bomb(), {"optimizer": {"lr": 0.1}}, [1, 2], "text"])
def test_objects_are_never_made_and_a_file_without_weights_is_a_sentence(tmp_path, tiny_model, content, capfd):
    path = checkpoint(tmp_path, content, model="preset:tiny-1m")
    with pytest.raises(UserError, match=r"without running code|contains no weights"):
        load_model(order(path, tiny_model, allow_pickle=True))
    assert "was run" not in "".join(capfd.readouterr())


def test_a_damaged_file_is_a_sentence(tmp_path, tiny_model):
    path = checkpoint(tmp_path, dict(preset_model().state_dict()), model="preset:tiny-1m")
    for content in (path.read_bytes()[:-500], b"", b"not a checkpoint"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"`ckpt.pt`"):
            load_model(order(path, tiny_model, allow_pickle=True))
    (tmp_path / "w.safetensors").write_bytes(b"12345678{")
    with pytest.raises(UserError, match=r"`w.safetensors` cannot be read"):
        load_model(order(tmp_path / "w.safetensors", tiny_model))


def test_a_file_of_old_times_is_read(tmp_path, tiny_model):
    model = preset_model()
    path = checkpoint(tmp_path, None, model="preset:tiny-1m")
    torch.save(dict(model.state_dict()), path, _use_new_zipfile_serialization=False)
    loaded = load_model(order(path, tiny_model, allow_pickle=True))
    assert torch.equal(logits(loaded.model, IDS), logits(model, IDS))


def test_weights_in_a_named_entry_are_found(tmp_path, tiny_model):
    weights = dict(preset_model().state_dict())
    path = checkpoint(tmp_path, {"ema": weights, "model": {"x": 1}}, model="preset:tiny-1m", weights="ema")
    load_model(order(path, tiny_model, allow_pickle=True))
    path = checkpoint(tmp_path, {"ema": weights}, model="preset:tiny-1m", weights="emma")
    with pytest.raises(UserError, match=r"no weights under `emma`; the file contains `ema`"):
        load_model(order(path, tiny_model, allow_pickle=True))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "not valid"),
        ("[]", "not a JSON object"),
        ('{"renames": {}}', "unknown key `renames`"),
        ('{"rename": ["a"]}', "`rename` must be an object"),
        ('{"rename": {"(": ""}}', "not valid"),
        ('{"drop": [3]}', "strings"),
        ('{"interleaved_rotary": 1}', "true or false"),
    ],
)
def test_a_key_map_that_is_none_is_a_sentence(tmp_path, content, why):
    (tmp_path / "m.keys.json").write_text(content)
    with pytest.raises(UserError, match=why):
        find_key_map(tmp_path / "m.pt")


def test_a_key_map_may_be_absent_but_not_unreadable(tmp_path, monkeypatch):
    assert find_key_map(tmp_path / "m.pt") == KeyMap()
    (tmp_path / "m.keys.json").touch()
    denied = lambda *_, **__: (_ for _ in ()).throw(PermissionError(13, "denied"))  # noqa: E731
    monkeypatch.setattr("tunewell.model_files.weights.read_text", denied)
    with pytest.raises(UserError, match="cannot be read: denied"):
        find_key_map(tmp_path / "m.pt")
