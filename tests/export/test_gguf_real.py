"""Real models as GGUF files of ours, in real llama.cpp: the same ids, the same logits, as near as their kind allows."""

import json

import numpy as np
import pytest
import torch
from gguf_tiny import Runtime, logits, write_gguf, write_smollm
from tokenizer_references import LlamaCpp
from transformers import AutoModelForCausalLM

from tunewell.data.tokenizers.load import load_tokenizer

TEXT = (
    "<|im_start|>user\nHow many days does a year have, and why are there leap years?<|im_end|>\n"
    "<|im_start|>assistant\nA year has 365 days. The earth needs a little longer for its way around the sun, about "
    "365.2422 days, so a day is added to February every four years: 1996, 2004, 2024.<|im_end|>\n"
)


@pytest.fixture(scope="module")
def smollm(tmp_path_factory):
    """SmolLM2-135M: its folder and its own logits on a chat."""
    folder = write_smollm(tmp_path_factory.mktemp("real") / "SmolLM2")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = load_tokenizer(folder).backend.encode(TEXT, add_special_tokens=False).ids
    return folder, ids, logits(model, ids)


def divergence(expected: np.ndarray, found: np.ndarray) -> float:
    """Compute the mean KL divergence over the places of a text."""
    wanted, given = (torch.log_softmax(torch.from_numpy(rows).double(), -1) for rows in (expected, found))
    return float((wanted.exp() * (wanted - given)).sum(-1).mean())


@pytest.mark.slow
# Shares of places with the same first word, and the mean divergence. The weights are bf16: f32 and bf16 lose nothing of
# them, f16 only what is smaller than 6e-8, Q8_0 up to 1/254 of the largest of a block of 32.
@pytest.mark.parametrize(
    ("kind", "same", "apart"), [("f32", 1.0, 1e-8), ("bf16", 1.0, 1e-3), ("f16", 1.0, 1e-3), ("q8_0", 0.95, 0.01)]
)
def test_llama_cpp_answers_as_python_does(smollm, tmp_path, kind, same, apart):
    folder, ids, expected = smollm
    write_gguf(folder, tmp_path / "m.gguf", kind=kind)
    with Runtime(tmp_path / "m.gguf") as llama:
        found = llama.logits(expected.shape[1], ids)
    assert (found.argmax(-1) == expected.argmax(-1)).mean() >= same
    assert divergence(expected, found) < apart


@pytest.mark.slow
@pytest.mark.shared
def test_ids_are_the_same_on_a_thousand_problems(smollm, tmp_path, shared_data):
    """Taking another way of cutting digits, as transformers does for this file, changes some of them."""
    folder, _, _ = smollm
    write_gguf(folder, tmp_path / "m.gguf", kind="q8_0")
    rows = [json.loads(line) for line in (shared_data / "gsm8k/train.jsonl").read_text().splitlines()[:500]]
    texts = [row[name] for row in rows for name in ("question", "answer")]
    backend = load_tokenizer(folder).backend
    with LlamaCpp(tmp_path / "m.gguf") as llama:
        assert [t for t in texts if llama.encode(t) != backend.encode(t, add_special_tokens=False).ids] == []


@pytest.mark.shared
def test_a_small_llama_with_pieces_answers_as_python_does(tmp_path, shared_data):
    """stories260K: a trained Llama of 260 thousand parameters with a SentencePiece vocabulary in tokenizer.json."""
    folder = shared_data / "stories260K/hf"
    write_gguf(folder, tmp_path / "m.gguf", kind="f32")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    backend = load_tokenizer(folder).backend
    ids = backend.encode("Once upon a time, there was a little girl named Lily.").ids
    with Runtime(tmp_path / "m.gguf") as llama:
        assert np.abs(llama.logits(model.config.vocab_size, ids) - logits(model, ids)).max() < 1e-3
    with LlamaCpp(tmp_path / "m.gguf") as llama:
        assert llama.encode("Once upon a time, there was a little girl named Lily.", with_bos=True) == ids
