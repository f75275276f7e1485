"""A GGUF file that is spoken to: llama.cpp computes it, and says what transformers says of the same numbers."""

import json
from pathlib import Path

import pytest
import torch
from gguf_tiny import write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from parrots import write_parrot, write_random
from tunewell.cli.main import main
from tunewell.cli.screens.chat import print_header
from tunewell.core.errors import UserError
from tunewell.data.text_pipeline import TextPipeline
from tunewell.inference.chat import Chat, ChatOptions
from tunewell.inference.chat_model import ChatModel, open_chat_model, open_in_llama_cpp
from tunewell.inference.llama_cpp.runtime import LlamaRuntime
from tunewell.runs.resolve import resolve_model

pytest.importorskip("xllamacpp")
QUESTIONS = ("Where is the river?", "naïve 日本 <|im_end|> x", "What  do\nyou see?", "a")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    return write_random(tmp_path_factory.mktemp("folder") / "model", tiny_model)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    path = tmp_path_factory.mktemp("file") / "model.gguf"
    write_gguf(folder, path, kind="f32")
    return path


@pytest.fixture(scope="module")
def parrot(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    made = write_parrot(tmp_path_factory.mktemp("parrot") / "parrot", tiny_model, "Yes, ok.")
    write_gguf(made, made.parent / "parrot.gguf", kind="f32")
    return made.parent / "parrot.gguf"


@pytest.fixture(scope="module")
def dequantised(file: Path) -> PreTrainedModel:
    """The file as transformers alone reads it."""
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    model.generation_config = GenerationConfig()
    return model


def voice_of(place: Path, **more) -> ChatModel:
    return open_chat_model(resolve_model(place, **more), with_base=bool(more), backend="llama_cpp")


@pytest.fixture(scope="module")
def voice(file: Path) -> ChatModel:
    return voice_of(file)


def by_transformers(model: PreTrainedModel, prompt: list[int], number: int, stops: list[int]) -> list[int]:
    settings = GenerationConfig(max_new_tokens=number, do_sample=False, eos_token_id=stops, pad_token_id=0)
    ids = torch.tensor([prompt])
    written = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    words = written[0, len(prompt) :].tolist()
    return words[: next((at for at, token in enumerate(words) if token in stops), None)]


def test_a_conversation_is_token_for_token_that_of_transformers(
    voice: ChatModel, folder: Path, dequantised: PreTrainedModel
) -> None:
    """Several turns on one cache, as they are streamed: a position or a token off by one, and the words differ."""
    assert isinstance(voice.runtime, LlamaRuntime) and voice.computed_by
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = Chat(voice, options=ChatOptions(length=12))
    for question in QUESTIONS:
        pieces = list(chat.reply(question))
        expected = by_transformers(dequantised, chat._prompt, 12, voice.stop_ids)
        words = tokenizer.decode(expected, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert "".join(pieces) == chat.answer.text == words
        assert chat.answer.num_tokens == len(expected)
    plain = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTIONS[0]}], add_generation_prompt=True, return_dict=False
    )
    fresh = Chat(voice, options=ChatOptions(length=1))
    list(fresh.reply(QUESTIONS[0]))
    assert fresh._prompt == plain


def test_answers_in_a_row_are_those_of_transformers(voice: ChatModel, dequantised: PreTrainedModel) -> None:
    draw = torch.Generator().manual_seed(2)
    prompts = [torch.randint(4, 490, (length,), generator=draw).tolist() for length in (1, 9, 40, 244, 256, 300)]
    found = voice.runtime.generate(prompts, max_new_tokens=16, stop_ids=[7, *voice.stop_ids])
    stops = [7, *voice.stop_ids]
    rooms = [min(16, max(0, 256 - len(prompt))) for prompt in prompts]
    expected = [
        by_transformers(dequantised, prompt, room, stops) if room else []
        for prompt, room in zip(prompts, rooms, strict=True)
    ]
    assert [answer.ids for answer in found] == expected
    ended = [len(ids) < room for ids, room in zip(expected, rooms, strict=True)]
    assert [answer.ended for answer in found] == ended


def test_answers_end_and_are_stopped_as_elsewhere(voice: ChatModel, parrot: Path) -> None:
    chat = Chat(voice_of(parrot))
    assert "".join(chat.reply("hi")) == "Yes, ok." and chat.answer.ended == "end"
    chat = Chat(voice, options=ChatOptions(length=1000))
    voice.stop_ids, known = [], voice.stop_ids
    list(chat.reply("hi"))
    assert chat.answer.ended == "context" and chat.context == 256
    assert chat.answer.num_tokens + chat.answer.num_prompt_tokens == 256
    chat = Chat(voice, options=ChatOptions(length=5))
    list(chat.reply("hi"))
    assert (chat.answer.ended, chat.answer.num_tokens) == ("length", 5)
    parts = chat.reply("more")
    next(parts)
    parts.close()
    assert chat.answer.ended == "stopped"
    assert "".join(chat.reply("again")) == chat.answer.text
    voice.stop_ids = known


def test_drawn_answers_repeat_with_their_seed(voice: ChatModel) -> None:
    def said(seed: int) -> str:
        return "".join(Chat(voice, options=ChatOptions(temperature=1.5, length=12, seed=seed)).reply("hi"))

    assert said(3) == said(3) and len({said(seed) for seed in range(4)}) > 1


def test_without_a_library_the_weights_are_dequantised_and_that_is_said(
    voice: ChatModel, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Chat(voice, options=ChatOptions(length=8))
    list(here.reply("hi"))
    monkeypatch.setattr("tunewell.inference.llama_cpp.library.installed_candidates", lambda: iter(()))
    monkeypatch.delenv("TUNEWELL_LLAMA_CPP", raising=False)
    without = voice_of(file)
    assert without.model is not None and without.computed_by == ""
    assert any("no usable llama.cpp library" in note and "transformers runs" in note for note in without.notes)
    there = Chat(without, options=ChatOptions(length=8))
    list(there.reply("hi"))
    assert there.answer.text == here.answer.text and without.stop_ids == voice.stop_ids


def test_only_a_file_that_is_asked_as_it_is_goes_to_llama_cpp(folder: Path, file: Path) -> None:
    """What is trained, written or put on a GPU is torch's."""
    subject = resolve_model(file)
    text = TextPipeline.load(subject.loaded)
    for device in ("cuda", "cuda:1", "mps"):
        assert open_in_llama_cpp(subject, text, device=device) == (None, [])
    assert open_chat_model(subject, device="cpu").model is not None
    assert voice_of(folder).model is not None


def test_a_template_whose_tokens_the_file_lacks_needs_other_rows(file: Path) -> None:
    subject = resolve_model(file, template="llama3", sets=["template.add_missing_tokens=true"])
    voice = open_chat_model(subject, device="cpu", backend="llama_cpp")
    assert voice.model is not None and any("which is not in the file" in note for note in voice.notes)


def test_a_base_answers_beside_it_whatever_it_is(parrot: Path, folder: Path, file: Path) -> None:
    said = []
    for base in (file, folder):
        chat = Chat(voice_of(parrot, base=str(base)), options=ChatOptions(length=8))
        assert "".join(chat.reply("hi")) == "Yes, ok."
        said.append("".join(chat.base_reply()))
    assert said[0] == said[1] != "Yes, ok."


def with_fewer_tokens(tokenizer: Path, folder: Path) -> Path:
    """Leave the ten last words out of a tokenizer."""
    folder.mkdir()
    saved = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))
    first = len(saved["model"]["vocab"]) - 10
    saved["model"]["vocab"] = {token: number for token, number in saved["model"]["vocab"].items() if number < first}
    saved["model"]["merges"] = saved["model"]["merges"][:-10]
    for token in saved["added_tokens"]:
        token["id"] -= 10
    (folder / "tokenizer.json").write_text(json.dumps(saved), encoding="utf-8")
    (folder / "tokenizer_config.json").write_bytes((tokenizer / "tokenizer_config.json").read_bytes())
    return folder


def test_a_base_with_fewer_tokens_is_refused(file: Path, tiny_model: Path, tmp_path: Path) -> None:
    """llama.cpp would be asked for words it does not have."""
    small = write_random(tmp_path / "small", with_fewer_tokens(tiny_model, tmp_path / "tokenizer"))
    base = tmp_path / "small.gguf"
    write_gguf(small, base, kind="f32")
    with pytest.raises(UserError, match="has 490 tokens, but the tuned model's tokenizer has 500"):
        voice_of(file, base=str(base))


def test_a_damaged_file_is_refused_in_words(file: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(UserError, match="not within the file"):
        voice_of(cut)


def test_the_screen_says_what_computes(voice: ChatModel, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_header(Chat(voice), with_base=False)
    assert "fp32 on cpu, runs with llama.cpp" in " ".join(capsys.readouterr().err.split())
    assert main(["chat", str(file), "--prompt", "hi", "--length", "4", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["computed_by"].startswith("llama.cpp") and told["tokens"] <= 4
