"""Loading: from wherever, whole, quiet, without the network, and fitting its tokenizer."""

import json
import shutil
import socket
import sys
from pathlib import Path

import pytest
import torch
from family_configs import config_of
from safetensors.torch import load_file, save_file
from tiny_models import logits, order, tiny, tiny_config
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration, Gemma3nConfig
from transformers.utils import logging

from tunewell.core.errors import UserError
from tunewell.models import attention
from tunewell.models.load import load_model

IDS = [5, 9, 40, 77, 3, 12, 64, 8, 30]


@pytest.fixture
def folder(tmp_path, tiny_model) -> Path:
    """A model folder as transformers writes it, with a vocabulary as large as the tokenizer's."""
    place = tmp_path / "model"
    tiny("llama", vocab_size=500).save_pretrained(place)
    shutil.copy(tiny_model / "tokenizer.json", place)
    return place


@pytest.fixture
def wider(tmp_path, tiny_model) -> Path:
    """The tokenizer with two more tokens, as `template.add_missing_tokens` makes it."""
    from tunewell.data.tokenizers.load import load_tokenizer

    place = tmp_path / "wider"
    load_tokenizer(tiny_model).with_tokens(["<new-1>", "<new-2>"]).save(place, None)
    return place


def change_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_folder_gives_what_transformers_gives(folder, tiny_model):
    loaded = load_model(order(folder, tiny_model))
    assert torch.equal(logits(loaded.model, IDS), logits(AutoModelForCausalLM.from_pretrained(folder), IDS))
    assert (loaded.notes, loaded.new_token_ids) == ([], [])
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


def test_the_precision_asked_for_is_given_whatever_the_file_holds(folder, tiny_model):
    """A file in fp32 and a config that says bf16, asked for in either."""
    change_config(folder, dtype="bfloat16")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = load_model(order(folder, tiny_model, dtype=dtype)).model
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_loading_says_nothing_and_leaves_the_talk_of_transformers_as_it_was(folder, tiny_model, capfd):
    logging.set_verbosity_info()
    try:
        load_model(order(folder, tiny_model))
        assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (logging.INFO, True)
    finally:
        logging.set_verbosity_warning()
    assert capfd.readouterr() == ("", "")


def test_what_is_on_this_machine_needs_no_network(folder, tiny_model, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    for source in (folder, folder / "model.safetensors", "preset:tiny-1m"):
        load_model(order(source, tiny_model))


def test_nothing_is_invented_for_a_missing_weight(folder, tiny_model):
    """transformers fills it with random numbers and a warning."""
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"incomplete: 1 weights are missing: `model.layers.1.mlp.up_proj.weight`"):
        load_model(order(folder, tiny_model))


def test_a_weight_of_another_shape_is_named(folder, tiny_model):
    change_config(folder, intermediate_size=64)
    with pytest.raises(UserError, match=r"20 weights do not have .* shape: `model.layers.0.mlp.down_proj.weight`"):
        load_model(order(folder, tiny_model))


def test_a_config_that_transformers_cannot_build_is_no_bug_of_ours(folder, tiny_model):
    """Guards "a bug in tunewell or a fault of the machine (KeyError: 'foo')"."""
    change_config(folder, hidden_act="foo")
    with pytest.raises(UserError, match=r"cannot build .* from its config: KeyError: 'foo'"):
        load_model(order(folder, tiny_model))


def test_a_weight_too_many_is_said(folder, tiny_model):
    weights = load_file(folder / "model.safetensors") | {"score.weight": torch.zeros(3)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    notes = load_model(order(folder, tiny_model)).notes
    assert notes == ["1 weights in the model's files are not used: `score.weight`"]


@pytest.mark.parametrize("damage", ["cut", "empty", "no config", "broken config", "unknown kind", "own code"])
def test_a_damaged_folder_is_a_sentence(folder, tiny_model, damage):
    weights, config = folder / "model.safetensors", folder / "config.json"
    match damage:
        case "cut":
            weights.write_bytes(weights.read_bytes()[:-100])
        case "empty":
            weights.write_bytes(b"")
        case "no config":
            config.unlink()
        case "broken config":
            config.write_text("{")
        case "unknown kind":
            change_config(folder, model_type="llama99", architectures=["Llama99"])
        case "own code":
            change_config(folder, model_type="mine", auto_map={"AutoConfig": "evil.Config"})
            (folder / "evil.py").write_text("raise SystemExit('code of a model was run')")
    with pytest.raises(UserError, match=r"cannot be|incomplete"):
        load_model(order(folder, tiny_model))


def test_pickled_weights_are_refused_until_they_are_allowed(folder, tiny_model):
    expected = logits(load_model(order(folder, tiny_model)).model, IDS)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="contain code") as caught:
        load_model(order(folder, tiny_model))
    assert "--allow-pickle" in str(caught.value.fix)
    assert torch.equal(logits(load_model(order(folder, tiny_model, allow_pickle=True)).model, IDS), expected)


def test_an_adapter_is_no_model(folder, tiny_model):
    """transformers would load it silently on top of its base."""
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="an adapter, not a model"):
        load_model(order(folder, tiny_model))


def test_a_tokenizer_alone_has_no_weights(tiny_model):
    with pytest.raises(UserError, match="has no weights"):
        load_model(order(tiny_model, tiny_model))


def test_an_unsupported_model_is_refused_before_its_weights_are_read(folder, tiny_model):
    (folder / "model.safetensors").write_bytes(b"not read")
    change_config(folder, **{**tiny_config("llama").to_dict(), "model_type": "bert"})
    with pytest.raises(UserError, match=r"`bert`.*bidirectional"):
        load_model(order(folder, tiny_model))


def test_a_nan_in_the_weights_is_named(folder, tiny_model):
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"`model.norm.weight` contains NaN"):
        load_model(order(folder, tiny_model))


@pytest.mark.parametrize("kind", ["llama", "phi", "gemma"])
def test_new_tokens_lengthen_both_tables_with_the_mean_of_the_old_rows(tmp_path, wider, kind):
    """Tied, untied, and with a bias on the head."""
    model = tiny(kind, vocab_size=500)
    model.save_pretrained(tmp_path / "m")
    dice = torch.get_rng_state()
    loaded = load_model(order(tmp_path / "m", wider, added_tokens=("<new-1>", "<new-2>")))
    assert torch.equal(torch.get_rng_state(), dice)
    assert (loaded.new_token_ids, loaded.model.config.vocab_size) == ([500, 501], 502)
    assert "2 new tokens: embedding and head now have 502 rows" in loaded.notes[0]
    for old, new in (
        (model.get_input_embeddings(), loaded.model.get_input_embeddings()),
        (model.get_output_embeddings(), loaded.model.get_output_embeddings()),
    ):
        assert torch.equal(new.weight[:500], old.weight)
        torch.testing.assert_close(new.weight[500:], old.weight.mean(0).expand(2, -1))
    if kind == "phi":
        torch.testing.assert_close(loaded.model.lm_head.bias[500:], model.lm_head.bias.mean().expand(2))
    is_tied = model.lm_head.weight is model.get_input_embeddings().weight
    assert (loaded.model.lm_head.weight is loaded.model.get_input_embeddings().weight) == is_tied == (kind == "gemma")
    torch.testing.assert_close(logits(loaded.model, IDS)[:, :500], logits(model, IDS))


def test_new_tokens_that_fit_into_spare_rows_lengthen_nothing(tmp_path, wider):
    """Many models have rows to spare; their ids still mean nothing yet."""
    tiny("llama", vocab_size=512).save_pretrained(tmp_path / "m")
    loaded = load_model(order(tmp_path / "m", wider, added_tokens=("<new-1>", "<new-2>")))
    assert (loaded.new_token_ids, loaded.model.config.vocab_size) == ([500, 501], 512)


@pytest.mark.parametrize(("rows", "added"), [(500, ()), (500, ("<new-1>",)), (499, ("<new-1>", "<new-2>"))])
def test_a_tokenizer_of_another_model_is_refused(tmp_path, wider, rows, added):
    tiny("llama", vocab_size=rows).save_pretrained(tmp_path / "m")
    with pytest.raises(UserError, match=rf"tokenizer of 502 ids, but .* has {rows}"):
        load_model(order(tmp_path / "m", wider, added_tokens=added))


def test_the_padding_token_learns_too(folder, tiny_model):
    """Nothing is ever padded here, and SmolLM2 pads with the token that ends every turn."""
    change_config(folder, pad_token_id=7)
    model = load_model(order(folder, tiny_model)).model
    model.get_input_embeddings().weight.requires_grad_(True)
    model(input_ids=torch.tensor([[5, 7, 9]]), labels=torch.tensor([[5, 7, 9]]), use_cache=False).loss.backward()
    assert model.get_input_embeddings().weight.grad[7].abs().sum() > 0


@pytest.mark.parametrize("style", ["as saved", "as on the hub since 2025"])
def test_the_text_part_of_gemma_3_is_loaded_and_saved_as_what_it_is(tmp_path, tiny_model, style):
    """Without the renaming transformers gives random weights; with it alone, it saves them under the old names."""
    sizes = tiny_config("gemma3_text", vocab_size=500).to_dict()
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    whole = Gemma3Config(text_config=sizes, vision_config=vision | {"image_size": 28, "patch_size": 14})
    model = Gemma3ForConditionalGeneration(whole).eval()
    model.save_pretrained(tmp_path / "m")
    if style != "as saved":
        weights = load_file(tmp_path / "m" / "model.safetensors")
        renamed = {name.replace("language_model.model.", "model.language_model."): t for name, t in weights.items()}
        save_file(renamed, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    loaded = load_model(order(tmp_path / "m", tiny_model))
    assert type(loaded.model).__name__ == "Gemma3ForCausalLM"
    assert "the text part of `gemma3` is trained; " in loaded.notes[0]
    assert torch.equal(logits(loaded.model, IDS), logits(model, IDS))
    loaded.model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(again, IDS), logits(model, IDS))


def test_the_text_part_of_gemma_3n_is_loaded(tmp_path, tiny_model):
    """Its towers need other packages, so their weights stand in by name."""
    text = tiny("gemma3n_text", vocab_size=500, vocab_size_per_layer_input=500)
    whole = Gemma3nConfig(text_config=text.config.to_dict())
    whole.architectures = ["Gemma3nForConditionalGeneration"]
    whole.save_pretrained(tmp_path / "m")
    weights = {
        name.replace("model.", "model.language_model.", 1): tensor.clone()
        for name, tensor in text.state_dict().items()
        if name != "lm_head.weight"
    }
    towers = {"model.vision_tower.x.weight": torch.zeros(3), "model.audio_tower.x.weight": torch.zeros(3)}
    save_file(weights | towers, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    loaded = load_model(order(tmp_path / "m", tiny_model))
    assert type(loaded.model).__name__ == "Gemma3nForCausalLM"
    assert "2 weights in the model's files are not used" in loaded.notes[0]
    assert torch.equal(logits(loaded.model, IDS), logits(text, IDS))
    loaded.model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), IDS), logits(text, IDS))


@pytest.mark.parametrize(
    ("kind", "text_kind", "prefix"),
    [
        ("qwen3_5", "qwen3_5_text", "model.language_model."),
        ("qwen3_5_moe", "qwen3_5_moe_text", "model.language_model."),
        ("mistral3", "mistral", "language_model.model."),
        ("llama4", "llama4_text", "language_model.model."),
    ],
)
def test_the_text_part_of_a_multimodal_folder_is_loaded(tmp_path, tiny_model, kind, text_kind, prefix):
    """The names are those of the hub; the weights of the towers stand in by name."""
    settings = config_of(text_kind).to_dict() | {"vocab_size": 500}
    text = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings)).eval()
    whole = AutoConfig.for_model(kind, text_config=settings).to_dict() | {"architectures": ["Whole"]}
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(whole))
    head = "language_model." if prefix.startswith("language_model") else ""
    weights = {
        name.replace("model.", prefix, 1) if name.startswith("model.") else head + name: tensor.clone()
        for name, tensor in text.state_dict().items()
    }
    towers = {"model.visual.x.weight": torch.zeros(3), "vision_tower.y.weight": torch.zeros(3)}
    save_file(weights | towers, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    loaded = load_model(order(tmp_path / "m", tiny_model, attention=attention.SDPA))
    assert type(loaded.model) is type(text)
    assert any(f"only the text part of `{kind}` is trained" in note for note in loaded.notes)
    with attention.stock_attention(loaded.model):
        torch.testing.assert_close(logits(loaded.model, IDS), logits(text, IDS), rtol=1e-5, atol=1e-6)


def test_a_hub_id_in_the_cache_is_loaded_without_the_hub(folder, tiny_model, tmp_path, monkeypatch):
    """What was downloaded once stays usable on a train."""
    from huggingface_hub import constants

    cache = tmp_path / "cache"
    snapshot = cache / "models--someone--tiny" / "snapshots" / ("a" * 40)
    shutil.copytree(folder, snapshot)
    refs = cache / "models--someone--tiny" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text("a" * 40)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name, module in list(sys.modules.items()):
        if name.startswith(("huggingface_hub", "transformers")) and "HF_HUB_CACHE" in vars(module):
            monkeypatch.setattr(module, "HF_HUB_CACHE", str(cache))
    loaded = load_model(order("someone/tiny", tiny_model))
    assert torch.equal(logits(loaded.model, IDS), logits(load_model(order(folder, tiny_model)).model, IDS))
    with pytest.raises(UserError, match="someone/else"):
        load_model(order("someone/else", tiny_model))


@pytest.mark.shared
def test_a_real_model_tells_its_story(shared_data):
    from tokenizers import Tokenizer

    from tunewell.inference.generate import generate

    folder = shared_data / "stories260K" / "hf"
    model = load_model(order(folder, folder)).model
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    told = generate(model, [tokenizer.encode("Once upon a time").ids], max_new_tokens=40, stop_ids=[2])[0]
    assert tokenizer.decode(told.ids).startswith(", there was a little girl named Lily. She loved to play outside")
