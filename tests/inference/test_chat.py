"""A conversation: the training template, transformers' words, and nothing lost or made up on the way."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from tiny import CHATML, SENTENCES, prepare, write_jsonl
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from parrots import write_parrot, write_random
from tunewell.config.schema import MethodSettings
from tunewell.core.errors import UserError
from tunewell.inference.chat import Chat, ChatOptions
from tunewell.inference.chat_model import ChatModel, open_chat_model
from tunewell.methods.base import trainable_parameters
from tunewell.methods.lora import Lora
from tunewell.runs.resolve import resolve_model


def voice_of(place: Path, **more) -> ChatModel:
    return open_chat_model(resolve_model(place, **more), device="cpu", with_base=bool(more))


@pytest.fixture(scope="module")
def parrot(tmp_path_factory, tiny_model) -> ChatModel:
    return voice_of(write_parrot(tmp_path_factory.mktemp("parrot") / "parrot", tiny_model, "Yes, ok."))


@pytest.fixture(scope="module")
def endless(tmp_path_factory, tiny_model) -> ChatModel:
    return voice_of(write_parrot(tmp_path_factory.mktemp("endless") / "endless", tiny_model, "Yes", then="!"))


@pytest.fixture(scope="module")
def random_model(tmp_path_factory, tiny_model) -> Path:
    return write_random(tmp_path_factory.mktemp("random") / "model", tiny_model)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, random_model) -> Path:
    model = AutoModelForCausalLM.from_pretrained(random_model)
    own = Lora.apply(model, MethodSettings(rank=4, alpha=16), seed=3)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in trainable_parameters(model).values():
            parameter.add_(torch.randn(parameter.shape) * 0.3)
    folder = tmp_path_factory.mktemp("adapter") / "adapter"
    folder.mkdir()
    own.files(str(random_model)).write(folder)
    return folder


def by_transformers(model, tokenizer, messages: list, number: int, stops: list[int]) -> str:
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    settings = GenerationConfig(max_new_tokens=number, do_sample=False, eos_token_id=stops, pad_token_id=0)
    written = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    words = written[0, ids.shape[1] :].tolist()
    end = next((at for at, token in enumerate(words) if token in stops), None)
    return tokenizer.decode(words[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("has_adapter", [False, True])
def test_answers_are_those_of_transformers_and_peft_turn_after_turn(random_model, adapter, has_adapter):
    """From folder to words, nothing in common with the reference but the files: loader, template, cache, text."""
    tokenizer = AutoTokenizer.from_pretrained(random_model)
    theirs = AutoModelForCausalLM.from_pretrained(random_model)
    if has_adapter:
        theirs = PeftModel.from_pretrained(theirs, adapter)
    voice = voice_of(adapter if has_adapter else random_model)
    answers = set()
    for question in SENTENCES[:5]:
        chat = Chat(voice, system="Be brief.", options=ChatOptions(length=9))
        messages = [{"role": "system", "content": "Be brief."}]
        for text in (question, "And then?"):
            messages.append({"role": "user", "content": text})
            expected = by_transformers(theirs.eval(), tokenizer, messages, 9, voice.stop_ids)
            assert "".join(chat.reply(text)) == expected == chat.answer.text
            messages.append({"role": "assistant", "content": expected})
            answers.add(expected)
        assert [{"role": "system", "content": "Be brief."}, *chat.messages] == messages
    assert len(answers) > 5


def test_the_base_answers_the_same_prompt_and_the_adapter_is_back_afterwards(random_model, adapter):
    voice = voice_of(adapter)
    alone = Chat(voice_of(random_model), options=ChatOptions(length=12))
    expected = "".join(alone.reply("hello"))
    chat = Chat(voice, options=ChatOptions(length=12))
    own = "".join(chat.reply("hello"))
    beside = chat.base_reply()
    assert next(beside)
    beside.close()
    assert "".join(chat.base_reply()) == expected != own
    chat.undo()
    assert "".join(chat.reply("hello")) == own
    assert [message["content"] for message in chat.messages] == ["hello", own]


def test_an_answer_says_how_it_ended(parrot, endless):
    chat = Chat(parrot)
    assert "".join(chat.reply("hi")) == "Yes, ok."
    assert (chat.answer.ended, chat.answer.num_tokens > 3, chat.answer.seconds > 0) == ("end", True, True)
    chat = Chat(endless, options=ChatOptions(length=20))
    "".join(chat.reply("hi"))
    assert (chat.answer.ended, chat.answer.num_tokens) == ("length", 20)
    chat.set_options(length=1000)
    "".join(chat.reply("hi"))
    assert chat.answer.ended == "context"
    assert chat.answer.num_tokens + chat.answer.num_prompt_tokens == chat.context == 256


def test_what_was_said_can_be_taken_back(parrot):
    chat = Chat(parrot)
    assert not chat.undo()
    "".join(chat.reply("one"))
    "".join(chat.reply("two"))
    assert chat.undo() and [message["content"] for message in chat.messages] == ["one", "Yes, ok."]
    chat.reset()
    assert chat.messages == [] and not chat.undo()


def test_an_answer_that_was_stopped_is_kept_as_far_as_it_came(endless):
    chat = Chat(endless)
    parts = chat.reply("hi")
    assert next(parts) + next(parts) == chat.answer.text
    parts.close()
    assert chat.messages[-1] == {"role": "assistant", "content": chat.answer.text}
    assert chat.answer.ended == "stopped"


def test_a_conversation_that_outgrows_the_context_forgets_its_beginning_but_not_the_system_prompt(parrot):
    chat = Chat(parrot, system="Answer kindly.")
    seen = []
    for number in range(12):
        "".join(chat.reply(f"question {number}, and some more words about it"))
        seen.append((chat.answer.num_dropped, chat.answer.num_prompt_tokens))
        assert chat.answer.ended == "end"
        assert "Answer kindly." in parrot.decode(chat._prompt) and f"question {number}," in parrot.decode(chat._prompt)
    assert seen[0][0] == 0 and seen[-1][0] > 0 and seen[-1][0] % 2 == 0
    assert all(length <= 256 - 64 for _, length in seen)
    assert len(chat.messages) == 24, "what the model no longer sees is still there to be saved"
    with pytest.raises(UserError, match="context holds 256"):
        chat.reply("long " * 300)
    assert len(chat.messages) == 24


def test_a_saved_conversation_can_be_learned_from(parrot, endless, tiny_model, tmp_path):
    """The file is made of rows as `prepare` reads them, and what was cut off teaches nobody to stop there."""
    file = write_jsonl(tmp_path / "chat.jsonl", [{"question": "q?", "answer": "an answer"}])
    file.write_text(file.read_text().rstrip("\n"))
    chat = Chat(parrot, system="Be kind.")
    with pytest.raises(UserError, match="nothing to save"):
        chat.save(file)
    "".join(chat.reply("one"))
    assert chat.save(file) == 1
    "".join(chat.reply("two <|im_end|>"))
    assert chat.save(file) == 2
    chat.reset()
    "".join(chat.reply("three"))
    chat.save(file)
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [len(row.get("messages", ())) for row in rows] == [0, 5, 3]
    assert rows[1]["messages"][0] == {"role": "system", "content": "Be kind."}
    with file.open("a", encoding="utf-8") as others:
        others.write('{"question": "by another hand?", "answer": "yes"}\n')
    "".join(chat.reply("four"))
    chat.save(file)
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [len(row.get("messages", ())) for row in rows] == [0, 5, 0, 5], "what others added since is kept"
    cut = Chat(endless, options=ChatOptions(length=5))
    "".join(cut.reply("four"))
    cut.save(tmp_path / "cut.jsonl")
    assert json.loads((tmp_path / "cut.jsonl").read_text())["messages"][-1]["weight"] == 0
    told = prepare(tmp_path, tiny_model, file, tmp_path / "cut.jsonl", sets=["data.held_out=0"])
    assert told["documents"] == 4, told
    with pytest.raises(UserError, match="cannot write"):
        chat.save(tmp_path)


def test_settings_that_make_no_sense_are_refused():
    for wrong in ({"temperature": -1.0}, {"temperature": float("nan")}, {"length": 0}, {"seed": -1}):
        with pytest.raises(UserError):
            ChatOptions(**wrong)


def test_drawing_follows_the_seed(random_model):
    voice = voice_of(random_model)

    def said(seed: int) -> str:
        return "".join(Chat(voice, options=ChatOptions(temperature=1.0, length=20, seed=seed)).reply("hi"))

    assert said(1) == said(1) != said(2)


SPACED = CHATML.replace(
    "+ '\\n' + message", "+ ':' + (' ' if message['role'] == 'assistant' else '') + message"
).replace("assistant\\n", "assistant:")


def test_a_space_that_the_template_puts_before_replies_does_not_grow_from_turn_to_turn(tiny_model, tmp_path):
    folder = write_parrot(tmp_path / "model", tiny_model, " Yes", prompt=":")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": SPACED}))
    voice = voice_of(folder)
    assert voice.masker is not None and voice.masker.frame.leading_space == " "
    chat = Chat(voice)
    for _ in range(3):
        assert "".join(chat.reply("hi")) == "Yes"
    assert voice.decode(chat._prompt).count("<|im_start|>assistant: Yes<|im_end|>") == 2


def test_a_model_without_a_template_goes_on_with_the_text(tiny_model, tmp_path):
    folder = write_random(tmp_path / "model", tiny_model)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    voice = voice_of(folder)
    assert voice.masker is None
    chat = Chat(voice, options=ChatOptions(length=4))
    first = "".join(chat.reply("Once upon"))
    "".join(chat.reply(" and then"))
    assert voice.decode(chat._prompt) == "Once upon" + first + " and then"
    with pytest.raises(UserError, match="no chat template"):
        chat.set_system("Be kind.")
