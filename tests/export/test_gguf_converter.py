"""Our GGUF files beside those of llama.cpp's own converter: the same tensors to the bit, the same fields.

The converter is `convert_hf_to_gguf.py` with its folders `conversion` and `gguf-py`, as the source archive of PyPI's
llama-cpp-python 0.3.36 carries them; TUNEWELL_LLAMA_CPP names the folder they lie in.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_tiny import CASES, save, tiny, write_gguf, write_pieces, write_smollm

KINDS = ("f32", "f16", "bf16", "q8_0")
# It knows a way of cutting text by a hash of the ids of one long text, so only real vocabularies have one: for tiny
# ones it is told the name. All else of it runs as it is.
RUN = """
import json, runpy, sys
from pathlib import Path
root, jobs = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
sys.path.insert(0, str(root))
from conversion.base import TextModel
own = TextModel.get_vocab_base_pre
for job in jobs:
    TextModel.get_vocab_base_pre = own if job["pre"] is None else lambda self, tokenizer, name=job["pre"]: name
    sys.argv = ["convert", job["folder"], "--outfile", job["target"], "--outtype", job["kind"]]
    runpy.run_path(str(root / "convert_hf_to_gguf.py"), run_name="__main__")
"""
# What it makes up from the folder's name; ours come from the card.
NAMES = {"general.name", "general.basename", "general.version", "general.finetune", "general.size_label"}
# It leaves these to llama.cpp's defaults, which depend on the pre-tokenizer's name, unless a file names them.
SAID_BY_US = {"tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token"}
# Case -> fields that differ, and why ours are right.
DIFFERENT = {
    # The layers that see everything are not every sixth: without the field llama.cpp takes every sixth for granted.
    "gemma3": {"gemma3.attention.sliding_window_pattern"},
    # It takes four times the width, as many keys as queries and the speed 10,000 for granted, whatever the config says.
    "phi": {"phi2.feed_forward_length", "phi2.attention.head_count_kv", "phi2.rope.freq_base"},
    "phi-tied": {"phi2.feed_forward_length", "phi2.attention.head_count_kv", "phi2.rope.freq_base"},
    "stablelm": {"stablelm.rope.freq_base"},
    "stablelm-parallel": {"stablelm.rope.freq_base"},
}
# llama.cpp opens no such file without a head; the converter leaves it out where the model shares it.
HEAD_OF_OURS = {"phi-tied": {"output.weight"}}
# What the converter makes no file of that llama.cpp opens, left out here; llama.cpp itself judges these in
# test_gguf_writer.py. Rows without a token it cuts off Gemma's table but not off its list of tokens; the norms of
# StableLM's heads it collects and then loses ("Unprocessed norms").
WITHOUT = {
    "gemma3": {"vocab_size": 500},
    "gemma3-six": {"vocab_size": 500},
    "stablelm-parallel": {"qk_layernorm": False},
}
PIECES = ("llama", "mistral", "phi3", "gemma3")


@pytest.fixture(scope="module")
def converter() -> Path:
    name = os.environ.get("TUNEWELL_LLAMA_CPP")
    if not name:
        pytest.skip("TUNEWELL_LLAMA_CPP names no folder with llama.cpp's converter")
    root = Path(name)
    for part in ("convert_hf_to_gguf.py", "conversion", "gguf-py"):
        assert (root / part).exists(), f"TUNEWELL_LLAMA_CPP is set, but {root} has no {part}"
    return root


def convert(converter: Path, folder: Path, jobs: list[dict[str, Any]]) -> None:
    """Run the converter on several folders in one process; a failure is the test's."""
    (folder / "jobs.json").write_text(json.dumps(jobs, default=str))
    done = subprocess.run([sys.executable, "-c", RUN, converter, folder / "jobs.json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def write_both(converter: Path, root: Path, models: dict[str, Path], *, is_named: bool = False) -> None:
    jobs = []
    for case, folder in models.items():
        for kind in KINDS:
            facts = write_gguf(folder, root / f"{case}.{kind}.ours", kind=kind)
            pre = None if is_named else facts.vocabulary.fields["tokenizer.ggml.pre"]
            jobs.append({"folder": folder, "target": root / f"{case}.{kind}.theirs", "kind": kind, "pre": pre})
    convert(converter, root, jobs)


@pytest.fixture(scope="module")
def files(converter, tmp_path_factory) -> Path:
    """Every case in every kind, twice, with the byte-level tokenizer."""
    root = tmp_path_factory.mktemp("both")
    models = {}
    for case in CASES:
        models[case] = save(tiny(case, **WITHOUT.get(case, {})), root / f"model-{case}")
        if case.startswith("phi3"):
            # Of Phi 3 it takes a tokenizer.json only under the name that Phi 4's has.
            config = models[case] / "tokenizer_config.json"
            config.write_text(json.dumps(json.loads(config.read_text()) | {"tokenizer_class": "GPT2Tokenizer"}))
    write_both(converter, root, models)
    return root


def contents(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    reader = gguf.GGUFReader(path)
    fields = {name: (field.types, field.contents()) for name, field in reader.fields.items()}
    return {name: value for name, value in fields.items() if not name.startswith("GGUF.")}, {
        tensor.name: tensor for tensor in reader.tensors
    }


def compare(root: Path, case: str, kind: str, *, differing: set[str], ours_alone: set[str]) -> None:
    ours, our_tensors = contents(root / f"{case}.{kind}.ours")
    theirs, their_tensors = contents(root / f"{case}.{kind}.theirs")
    unlike = {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}
    assert unlike - NAMES - {name for name in SAID_BY_US if name not in theirs} == differing
    assert our_tensors.keys() - their_tensors.keys() == ours_alone and their_tensors.keys() <= our_tensors.keys()
    for name, expected in their_tensors.items():
        found = our_tensors[name]
        assert (found.tensor_type, list(found.shape)) == (expected.tensor_type, list(expected.shape)), name
        if name == "rope_freqs.weight":
            # Ours come from transformers' own formula, in another order of operations.
            np.testing.assert_allclose(found.data, expected.data, rtol=3e-7)
        else:
            np.testing.assert_array_equal(found.data, expected.data, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_a_file_of_ours_is_the_converters(files, case, kind):
    compare(files, case, kind, differing=DIFFERENT.get(case, set()), ours_alone=HEAD_OF_OURS.get(case, set()))


@pytest.fixture(scope="module")
def piece_files(converter, tmp_path_factory) -> Path:
    """The same with a SentencePiece model beside the weights."""
    root = tmp_path_factory.mktemp("pieces")
    models = {}
    for case in PIECES:
        folder = root / f"model-{case}"
        tiny(case).save_pretrained(folder)
        models[case] = write_pieces(folder, dummy_prefix=case != "gemma3", num_pieces=500)
    write_both(converter, root, models)
    return root


@pytest.mark.slow
@pytest.mark.parametrize("case", PIECES)
def test_a_sentencepiece_model_is_written_as_the_converter_writes_it(piece_files, case):
    # It says nothing about spaces where the files do not (llama.cpp's default is ours then), and Gemma's it knows.
    said = {"tokenizer.ggml.add_space_prefix"} if case != "gemma3" else set()
    # The template ends turns by a token that is not the eos: ours says so. Names of tokens it looks up in a
    # tokenizer.json alone, so the unknown one it leaves to llama.cpp's default, which is ours too.
    said |= {"tokenizer.ggml.eot_token_id", "tokenizer.ggml.unknown_token_id"}
    for kind in ("f32", "q8_0"):
        compare(piece_files, case, kind, differing=DIFFERENT.get(case, set()) | said, ours_alone=set())


@pytest.mark.slow
def test_a_real_model_is_written_as_the_converter_writes_it(converter, tmp_path):
    """Here it recognises by itself how text is cut."""
    write_both(converter, tmp_path, {"smollm": write_smollm(tmp_path / "SmolLM2")}, is_named=True)
    for kind in KINDS:
        compare(tmp_path, "smollm", kind, differing=set(), ours_alone=set())
