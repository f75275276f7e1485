"""Losses, logits and weights of a GGUF file in llama.cpp, against plain transformers."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from llama_cpp_tiny import tiny_llama, write_tiny_gguf
from transformers import PreTrainedModel

from tunewell.core.errors import UserError
from tunewell.inference.llama_cpp.library import find_llama
from tunewell.inference.llama_cpp.runtime import LlamaRuntime

pytest.importorskip("xllamacpp")
LENGTHS = (1, 2, 30, 511, 513, 700, 1100)
"""Around the 512 tokens that are read at once, and beyond both the first context and what the model was made for."""


class Rows:
    """Documents of many lengths, supervised here and there."""

    def __init__(self, size: int) -> None:
        draw = np.random.default_rng(1)
        ids = [draw.integers(4, size, length).astype(np.int32) for length in LENGTHS]
        self.rows = [(row, np.where(draw.random(len(row)) < 0.4, row, -100).astype(np.int32)) for row in ids]
        self.index: Any = {"length": np.array(LENGTHS)}

    def __len__(self) -> int:
        return len(self.rows)

    def arrays(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Give ids and labels."""
        return self.rows[index]


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> PreTrainedModel:
    return tiny_llama(tiny_model)


@pytest.fixture
def runtime(model: PreTrainedModel, tiny_model: Path, tmp_path: Path) -> Any:
    made = LlamaRuntime(find_llama(), write_tiny_gguf(tmp_path / "m.gguf", model, tiny_model))
    yield made
    made.close()
    made.close()


def test_losses_of_every_document_are_those_of_transformers(runtime: LlamaRuntime, model: PreTrainedModel) -> None:
    """Each supervised token is charged to its own document, across blocks and as the context grows."""
    rows = Rows(runtime.vocab_size)
    told: list[tuple[int, int]] = []
    losses = runtime.losses(rows, most=None, progress=lambda at: told.append((at.done, at.total)))
    documents, sums, tokens = losses.documents, losses.sums, losses.tokens
    assert documents.tolist() == list(range(len(rows))) and told[-1] == (len(rows), len(rows))
    for (ids, labels), found, number in zip(rows.rows, sums, tokens, strict=True):
        assert number == (labels[1:] != -100).sum()
        if not number:
            assert found == 0
            continue
        with torch.no_grad():
            out = model(input_ids=torch.tensor(ids)[None].long(), labels=torch.tensor(labels)[None].long())
        assert found / number == pytest.approx(float(out.loss), abs=1e-3)
    some = runtime.losses(rows, most=3)
    assert some.documents.tolist() == [0, 3, 6] and np.allclose(some.sums, sums[[0, 3, 6]], rtol=1e-5)


def test_logits_of_the_next_token_are_the_models_own(runtime: LlamaRuntime, model: PreTrainedModel) -> None:
    prompts = [ids.tolist() for ids, _ in Rows(runtime.vocab_size).rows]
    found = runtime.next_logits(prompts)
    for prompt, row in zip(prompts, found, strict=True):
        with torch.no_grad():
            own = model(input_ids=torch.tensor([prompt])).logits[0, -1].numpy()
        np.testing.assert_allclose(row, own, atol=2e-3)
        assert row.argmax() == own.argmax()


def test_a_context_grows_with_what_is_read(
    runtime: LlamaRuntime, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache of a long context can be larger than the weights: it is not asked for in advance."""

    def refuse(context: int) -> Any:
        raise UserError(f"there is no memory for {context}")

    wide = tiny_llama(tiny_model, max_position_embeddings=100_000)
    path = write_tiny_gguf(runtime.path.with_name("wide.gguf"), wide, tiny_model)
    opened = LlamaRuntime(find_llama(), path)
    assert opened.context_length == 100_000 and opened._model.context == 1024
    prompt = np.random.default_rng(0).integers(4, opened.vocab_size, 1500).tolist()
    answer = opened.stream(prompt, max_new_tokens=6, stop_ids=[])
    ids = list(answer)
    assert opened._model.context == 2048 and answer.ended == "length"
    with torch.no_grad():
        own = wide(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].argmax(-1)
    assert ids == own.tolist()
    monkeypatch.setattr(opened, "_open", refuse)
    with pytest.raises(UserError):
        next(opened.stream(prompt, max_new_tokens=4000, stop_ids=[]))
    assert list(opened.stream(prompt, max_new_tokens=6, stop_ids=[])) == ids, "a request that was too large ends alone"
    opened.close()


@pytest.mark.parametrize("place", ["blk.1.ffn_down.weight", "output.weight", "output_norm.weight"])
def test_weights_that_are_no_numbers_are_found_and_named(runtime: LlamaRuntime, place: str) -> None:
    assert runtime.nonfinite_weights() == {}
    file = gguf.GGUFReader(runtime.path, "r+")
    next(tensor for tensor in file.tensors if tensor.name == place).data.reshape(-1)[3:5] = np.nan
    file.data.flush()
    broken = LlamaRuntime(find_llama(), runtime.path)
    assert broken.nonfinite_weights() == {place: 2}
    broken.close()


def test_it_says_what_it_is(runtime: LlamaRuntime) -> None:
    assert runtime.stored_as == "fp32" and runtime.computed_by.startswith("llama.cpp")
    assert "xllamacpp" in runtime.computed_by and runtime.num_threads >= 1
