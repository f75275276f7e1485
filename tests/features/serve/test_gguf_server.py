"""A GGUF file behind OpenAI's API: llama.cpp's tokens, the official client, and what transformers would say."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf_tiny import write_gguf
from serving import HELLO, NAME, client_of, served
from transformers import AutoModelForCausalLM, AutoTokenizer

from parrots import write_random
from tunewell.features.serve.command import screen
from tunewell.features.serve.queue import ServedModel
from tunewell.features.serve.workflow import ListenOptions, open_server
from tunewell.inference.chat_model import open_chat_model
from tunewell.runs.resolve import resolve_model

pytest.importorskip("xllamacpp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    made = write_random(tmp_path_factory.mktemp("served") / "model", tiny_model, seed=1)
    write_gguf(made, made.parent / "model.gguf", kind="f32")
    return made


def test_a_file_is_served_as_transformers_would_answer(folder: Path) -> None:
    """Streamed, whole, and after a client that left in the middle: the cache is that of the next text then."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    voice = open_chat_model(resolve_model(folder.parent / "model.gguf"), backend="llama_cpp")
    assert voice.computed_by.startswith("llama.cpp")
    with served(ServedModel(voice, NAME)) as url:
        client = client_of(url)
        left = client.chat.completions.create(model=NAME, messages=HELLO, stream=True, max_tokens=200)
        next(iter(left))
        left.close()
        for words in ("Where is it?", "naïve 日本", "x" * 40):
            asked = [{"role": "user", "content": words}]
            ids = tokenizer.apply_chat_template(
                asked, add_generation_prompt=True, return_tensors="pt", return_dict=False
            )
            with torch.no_grad():
                written = model.generate(
                    ids, max_new_tokens=12, do_sample=False, eos_token_id=voice.stop_ids, pad_token_id=0
                )
            expected = [token for token in written[0, ids.shape[1] :].tolist() if token not in voice.stop_ids]
            text = tokenizer.decode(expected, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            whole = client.chat.completions.create(model=NAME, messages=asked, max_tokens=12)
            assert whole.choices[0].message.content == text
            assert whole.usage.completion_tokens == len(expected)
            chunks = client.chat.completions.create(model=NAME, messages=asked, max_tokens=12, stream=True)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


def test_the_server_says_what_computes(folder: Path) -> None:
    serving = open_server(resolve_model(folder.parent / "model.gguf"), options=ListenOptions(port=0))
    serving._listener.close()
    ready = serving.info
    assert ready.computed_by.startswith("llama.cpp") and ready.context_length == 256 and ready.device == "cpu"
    assert f"on cpu in fp32 with {ready.computed_by}, context of 256 tokens" in " ".join(screen(ready).split())
    assert "in fp32, context of 256" in " ".join(screen(replace(ready, computed_by="")).split())
