"""GGUF files of ours: what goes in comes out, in llama.cpp, in transformers, in the `gguf` package and in tunewell."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_tiny import CASES, IDS, ROWS, Runtime, logits, plan_file, save, tiny, write_gguf
from safetensors.torch import load_file, save_file
from tiny import CHATML
from transformers import AutoConfig, AutoModelForCausalLM

from tunewell.core.errors import UserError
from tunewell.export.gguf.architecture import read_settings
from tunewell.models.gguf import read_gguf_config, read_gguf_weights

# llama.cpp's GELU looks its values up in a table of halves; all else is fp32 there, with another order of sums.
GELU = re.compile("gemma|phi(?!3)")
FP32, HALF_TABLE = 1e-4, 1e-2
# Rows of 64 and 96 numbers: both are whole blocks of Q8_0.
TYPES = {"f32": {"F32"}, "f16": {"F16", "F32"}, "bf16": {"BF16", "F32"}, "q8_0": {"Q8_0", "F32"}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Each case's model and its folder, made when first asked for."""
    root, made = tmp_path_factory.mktemp("models"), {}

    def get(case):
        if case not in made:
            model = tiny(case)
            made[case] = (model, save(model, root / case))
        return made[case]

    return get


def tensors_of(path):
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("case", CASES)
def test_llama_cpp_computes_the_logits_of_the_model(tmp_path, folders, case):
    """One wrong row, field, norm or table and they are others by whole numbers; nobody here wrote the judge."""
    model, folder = folders(case)
    write_gguf(folder, tmp_path / "m.gguf", kind="f32")
    with Runtime(tmp_path / "m.gguf", length=256) as llama:
        found = llama.logits(ROWS)
    assert np.abs(found - logits(model)).max() < (HALF_TABLE if GELU.match(case) else FP32)


def test_positions_behind_the_original_length_are_stretched_by_the_long_table(tmp_path, folders):
    model, folder = folders("phi3-long")
    write_gguf(folder, tmp_path / "m.gguf", kind="f32")
    ids = (IDS * 20)[:300]
    with Runtime(tmp_path / "m.gguf", length=512) as llama:
        # The angle of position 300 is rounded ten times as far from the true one as that of position 30.
        assert np.abs(llama.logits(ROWS, ids) - logits(model, ids)).max() < 10 * FP32


@pytest.mark.parametrize("case", ["llama", "llama-tied", "mistral", "qwen2", "qwen3", "gemma3", "phi3", "stablelm"])
def test_transformers_computes_the_logits_of_the_model(tmp_path, folders, case):
    model, folder = folders(case)
    write_gguf(folder, tmp_path / "m.gguf", kind="f32", name="tiny")
    # It reads some settings from no file; Mistral it knows only as the Llama that such files call it.
    given = {} if case == "mistral" else {"config": AutoConfig.from_pretrained(folder)}
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32, **given).eval()
    assert np.abs(logits(read) - logits(model)).max() < FP32


@pytest.mark.parametrize("case", ["llama-tied", "llama-wide-heads", "qwen2", "qwen3"])
def test_our_own_reader_gives_every_tensor_back(tmp_path, folders, case):
    model, folder = folders(case)
    write_gguf(folder, tmp_path / "m.gguf", kind="f32")
    config = read_gguf_config(tmp_path / "m.gguf")
    found = read_gguf_weights(tmp_path / "m.gguf", config)
    assert set(model.state_dict()) == set(found)
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())
    for name in ("hidden_size", "rope_parameters", "num_key_value_heads", "tie_word_embeddings", "vocab_size"):
        assert getattr(config, name) == getattr(model.config, name), name
    assert config.rms_norm_eps == np.float32(model.config.rms_norm_eps)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("case", ["llama", "gemma3", "phi", "stablelm-parallel"])
def test_each_kind_is_stored_as_it_says_and_norms_stay_whole(tmp_path, folders, case, kind):
    _, folder = folders(case)
    plan = write_gguf(folder, tmp_path / "m.gguf", kind=kind)
    write_gguf(folder, tmp_path / "whole.gguf", kind="f32")
    found, whole = tensors_of(tmp_path / "m.gguf"), tensors_of(tmp_path / "whole.gguf")
    assert {tensor.tensor_type.name for tensor in found.values()} == TYPES[kind]
    num_bytes = (tmp_path / "m.gguf").stat().st_size
    assert plan.tensors.keys() == found.keys() and num_bytes <= plan.num_bytes < num_bytes + (2 << 20)
    for name, tensor in found.items():
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        exact = whole[name].data
        # Half a step: 2^-11 of a half, 2^-8 of a bfloat, 1/127 of the largest of a block for Q8_0.
        bound = {"f32": 0, "f16": 2**-11, "bf16": 2**-8, "q8_0": 2**-7}[kind] * np.abs(exact).max()
        if "norm" in name or len(tensor.shape) == 1:
            assert tensor.tensor_type.name == "F32"
            np.testing.assert_array_equal(numbers.reshape(exact.shape), exact)
        assert np.abs(numbers.reshape(exact.shape) - exact).max() <= bound, name


def test_rows_that_fill_no_block_become_halves(tmp_path):
    folder = save(tiny("llama", intermediate_size=80), tmp_path / "model")
    write_gguf(folder, tmp_path / "m.gguf", kind="q8_0")
    found = tensors_of(tmp_path / "m.gguf")
    assert found["blk.0.ffn_down.weight"].tensor_type.name == "F16"
    assert found["blk.0.ffn_up.weight"].tensor_type.name == "Q8_0"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_half_the_size_in_several_files_lose_nothing(tmp_path, dtype):
    model = tiny("qwen3").to(dtype)
    folder = save(model, tmp_path / "model", max_shard_size="100KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    write_gguf(folder, tmp_path / "m.gguf", kind="f32")
    found = read_gguf_weights(tmp_path / "m.gguf", read_gguf_config(tmp_path / "m.gguf"))
    assert all(torch.equal(found[name], tensor.float()) for name, tensor in model.state_dict().items())


def test_a_shared_table_is_written_once_and_a_needed_head_twice(tmp_path, folders):
    """llama.cpp shares the table where a file has no head, except where its code asks for one."""
    for case, has_head in (("llama-tied", False), ("gemma3", False), ("phi-tied", True), ("llama", True)):
        write_gguf(folders(case)[1], tmp_path / "m.gguf", kind="f32")
        assert ("output.weight" in tensors_of(tmp_path / "m.gguf")) == has_head, case


def test_the_header_says_what_it_is_and_where_it_comes_from(tmp_path, folders):
    write_gguf(folders("qwen2")[1], tmp_path / "m.gguf", kind="q8_0", name="Rös", license="apache-2.0")
    fields = {name: field.contents() for name, field in gguf.GGUFReader(tmp_path / "m.gguf").fields.items()}
    assert fields["general.name"] == "Rös" and fields["general.license"] == "apache-2.0"
    assert fields["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q8_0 and fields["general.quantization_version"] == 2
    assert fields["tokenizer.chat_template"] == CHATML
    assert fields["tokenizer.ggml.eos_token_id"] == 498 and fields["tokenizer.ggml.padding_token_id"] == 499
    assert fields["tokenizer.ggml.add_bos_token"] is False
    assert len(fields["tokenizer.ggml.tokens"]) == ROWS and fields["tokenizer.ggml.token_type"][-1] == 5


def test_a_name_with_phi_3_in_it_does_not_break_the_file(tmp_path, folders):
    """By that name llama.cpp takes for granted that the vocabulary is Phi 3's, and refuses to open any other."""
    model, folder = folders("phi3")
    write_gguf(folder, tmp_path / "m.gguf", kind="f32", name="my-Phi-3-tune")
    with Runtime(tmp_path / "m.gguf") as llama:
        assert np.abs(llama.logits(ROWS) - logits(model)).max() < FP32


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_refused_by_its_tensor_and_leaves_nothing(tmp_path, bad):
    model = tiny("llama-tied")
    model.model.layers[2].mlp.up_proj.weight.data[3, 4] = bad
    folder = save(model, tmp_path / "model")
    (tmp_path / "m.gguf").write_bytes(b"the old one")
    with pytest.raises(UserError, match=r"model\.layers\.2\.mlp\.up_proj\.weight.*NaN or infinity"):
        write_gguf(folder, tmp_path / "m.gguf", kind="q8_0")
    assert (tmp_path / "m.gguf").read_bytes() == b"the old one"
    assert {path.name for path in tmp_path.iterdir()} == {"m.gguf", "model"}


def test_a_number_too_large_for_a_half_is_refused_and_fits_elsewhere(tmp_path):
    model = tiny("llama-tied")
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = 70_000.0
    folder = save(model, tmp_path / "model")
    with pytest.raises(UserError, match="65,504"):
        write_gguf(folder, tmp_path / "m.gguf", kind="f16")
    write_gguf(folder, tmp_path / "m.gguf", kind="bf16")


def test_a_full_disk_is_told_before_anything_is_written(tmp_path, folders, monkeypatch):
    _, folder = folders("llama")
    needed = plan_file(folder, "f16").num_bytes
    room = shutil.disk_usage(tmp_path)._replace(free=needed - 1)
    monkeypatch.setattr("tunewell.core.files.shutil.disk_usage", lambda _: room)
    with pytest.raises(UserError, match="not enough disk space"):
        write_gguf(folder, tmp_path / "m.gguf", kind="f16")
    assert list(tmp_path.iterdir()) == []


def test_progress_counts_every_byte_of_the_tensors(tmp_path, folders):
    _, folder = folders("smollm3")
    seen = []
    write_gguf(folder, tmp_path / "m.gguf", kind="f16", progress=lambda at: seen.append((at.done, at.total)))
    sizes = sum(tensor.n_bytes for tensor in tensors_of(tmp_path / "m.gguf").values())
    assert seen[-1] == (sizes, sizes) and [done for done, _ in seen] == sorted(done for done, _ in seen)


def damaged(folder: Path, target: Path, change) -> Path:
    """Copy a model folder with changed tensors."""
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, target / "model.safetensors")
    return target


def test_a_head_that_is_not_the_shared_table_is_refused(tmp_path, folders):
    """A head that was trained and then lost: llama.cpp would open such a file."""

    def change(weights):
        weights["lm_head.weight"] = torch.ones(ROWS, 64)

    folder = damaged(folders("llama-tied")[1], tmp_path / "damaged", change)
    with pytest.raises(UserError, match="are different tensors"):
        write_gguf(folder, tmp_path / "m.gguf", kind="f32")


def test_the_same_table_written_twice_is_no_harm(tmp_path, folders):
    def double(weights):
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()

    twice = damaged(folders("llama-tied")[1], tmp_path / "twice", double)
    write_gguf(twice, tmp_path / "m.gguf", kind="f32")
    assert "output.weight" not in tensors_of(tmp_path / "m.gguf")


def test_more_ids_than_rows_are_refused(tmp_path):
    folder = save(tiny("llama", vocab_size=499), tmp_path / "model")
    with pytest.raises(UserError, match="500 tokens, but the model's embedding has only 499 rows"):
        write_gguf(folder, tmp_path / "m.gguf", kind="f32")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "gpt2"}, "`gpt2` cannot be written.*\n.*\n.*gemma3, .*llama, mistral"),
        ({}, "`None` cannot be written"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "`hidden_act` is 'gelu'"),
        ({"model_type": "llama", "quantization_config": {"bits": 4}}, "already quantised"),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "RoPE scaling `dynamic`"),
        ({"model_type": "qwen2", "rope_parameters": {**CASES["llama-3"][1]["rope_parameters"]}}, "scaling `llama3`"),
        ({"model_type": "qwen3", "attention_bias": True}, "`attention_bias`"),
        ({"model_type": "smollm3", "num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 1]}, "every fourth"),
        ({"model_type": "gemma3_text", "query_pre_attn_scalar": 100}, "`query_pre_attn_scalar` is 100"),
        ({"model_type": "phi", "qk_layernorm": True}, "`qk_layernorm`"),
        (
            {"model_type": "llama", "rope_parameters": {**CASES["llama-yarn"][1]["rope_parameters"], "mscale": 0.7}},
            "`yarn` sets `mscale`",
        ),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused_before_training(config, words):
    with pytest.raises(UserError, match=words):
        read_settings(config)


@pytest.mark.parametrize("case", CASES)
def test_the_settings_of_a_model_in_memory_are_judged_as_those_of_its_file(folders, case):
    model, folder = folders(case)
    read_settings(model.config.to_dict())
    read_settings(json.loads((folder / "config.json").read_text()))


def test_settings_that_are_none_are_told():
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        read_settings({"model_type": "llama", "hidden_size": "wide"})


def test_an_old_config_is_read_as_the_new_one():
    """Before transformers 5, `rope_theta` and `rope_scaling` stood apart."""
    rope = dict(CASES["llama-3"][1]["rope_parameters"])
    theta = rope.pop("rope_theta")
    read_settings({"model_type": "llama", "rope_theta": theta, "rope_scaling": rope})
    read_settings({"model_type": "mistral"})


def test_a_window_that_llama_cpp_does_not_honour_is_said(tmp_path):
    folder = save(tiny("mistral", sliding_window=5), tmp_path / "model")
    assert "the last 5 tokens" in write_gguf(folder, tmp_path / "m.gguf", kind="f16").notes[0]


@pytest.mark.slow
def test_memory_stays_at_some_rows_of_the_largest_tensor(tmp_path):
    """A table of 200 MB in fp32, written in parts: the peak may grow by the pages of the file and little more."""
    code = """
import resource, sys
from pathlib import Path
import gguf, torch
from tunewell.export.gguf.weights import LazyTensor
kind = gguf.GGMLQuantizationType.Q8_0
table = torch.ones(50_000, 1024)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with Path(sys.argv[1]).open("wb") as file:
    LazyTensor("table", tuple(table.shape), kind, lambda: table).tofile(file)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "table")]
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert grown < 150
