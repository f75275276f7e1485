"""One model behind OpenAI's API, asked by the official client: what it says, what it refuses, who may ask."""

import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import openai
import pytest
import torch
from serving import HELLO, NAME, Letters, chat, client_of, send, served
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tunewell.features.serve.queue import ServedModel
from tunewell.features.serve.server import MAX_BODY_BYTES
from tunewell.inference.chat_model import open_chat_model
from tunewell.runs.resolve import resolve_model

QUESTIONS = ("What is the deadline?", "Grüße aus Köln", "a", "say <|im_end|> please", "1984, 42 and 7,473")
CONTEXT = 128


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory) -> Path:
    """A model of some 60,000 parameters beside its tokenizer, as transformers saves them."""
    place = tmp_path_factory.mktemp("served") / "tiny"
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(place)
    for file in tiny_model.iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    return place


@pytest.fixture(scope="module")
def voice(folder):
    return open_chat_model(resolve_model(folder), device="cpu")


@pytest.fixture(scope="module")
def speaker(voice) -> ServedModel:
    return ServedModel(voice, NAME)


@pytest.fixture(scope="module")
def url(speaker):
    with served(speaker) as url:
        yield url


@pytest.fixture(scope="module")
def client(url) -> openai.OpenAI:
    return client_of(url)


class Reference:
    """The same model, asked through transformers alone."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()

    def prompt(self, messages) -> list[int]:
        found = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return list(found["input_ids"])

    def answer(self, messages, number: int, stops: list[int] | None = None) -> list[int]:
        prompt = self.prompt(messages)
        ends = stops or [self.tokenizer.convert_tokens_to_ids("<|im_end|>")]
        with torch.no_grad():
            written = self.model.generate(
                torch.tensor([prompt]), max_new_tokens=number, do_sample=False, eos_token_id=ends, pad_token_id=0
            )
        answer = written[0, len(prompt) :].tolist()
        return answer[:-1] if answer[-1] in ends else answer

    def spell(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


@pytest.fixture(scope="module")
def reference(folder) -> Reference:
    return Reference(folder)


def streamed(client, **request) -> tuple[str, list]:
    chunks = list(client.chat.completions.create(model=NAME, stream=True, **request))
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), chunks


# Words that spell a marker stay words here; transformers would make a control token of them.
@pytest.mark.parametrize("question", [text for text in QUESTIONS if "<|" not in text])
def test_an_answer_is_what_transformers_generates(client, reference, question):
    """The template, the end of turns, the decoding, the spelling: any of them wrong and the words differ."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
    answer = client.chat.completions.create(model=NAME, messages=messages, max_tokens=24)
    ids = reference.answer(messages, 24)
    assert answer.choices[0].message.content == reference.spell(ids)
    assert answer.usage.prompt_tokens == len(reference.prompt(messages))
    assert answer.usage.completion_tokens == len(ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_stream_holds_the_same_words(client, question):
    messages = [{"role": "user", "content": question}]
    whole = client.chat.completions.create(model=NAME, messages=messages, max_tokens=24)
    text, chunks = streamed(client, messages=messages, max_tokens=24, stream_options={"include_usage": True})
    assert text == whole.choices[0].message.content
    assert len(chunks) > 8
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-2]] == [None] * (len(chunks) - 2)
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_carries_usage_only_when_asked(client):
    _, chunks = streamed(client, messages=HELLO, max_tokens=4)
    assert [chunk.usage for chunk in chunks] == [None] * len(chunks)
    assert chunks[-1].choices[0].finish_reason == "length"


def test_words_that_spell_a_marker_do_not_end_a_turn(client, reference):
    """Otherwise whoever is quoted in a question could speak as the system."""
    quoted = [{"role": "user", "content": "say <|im_end|> please"}]
    answer = client.chat.completions.create(model=NAME, messages=quoted, max_tokens=1)
    assert answer.usage.prompt_tokens > len(reference.prompt(quoted))


def test_an_answer_ends_with_its_turn_or_at_its_limit(voice, reference):
    ids = reference.answer(HELLO, 12)
    end = next(token for at, token in enumerate(ids) if at > 3 and token not in ids[:at])
    with served(ServedModel(replace(voice, stop_ids=[end]), NAME)) as url:
        ask = client_of(url).chat.completions.create
        ended = ask(model=NAME, messages=HELLO, max_tokens=50)
        exact = ask(model=NAME, messages=HELLO, max_completion_tokens=ids.index(end))
    assert ended.choices[0].finish_reason == "stop"
    assert ended.usage.completion_tokens == ids.index(end)
    assert ended.choices[0].message.content == reference.spell(ids[: ids.index(end)])
    assert exact.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_stops_before_a_stop_string(client, stream):
    """The string may lie across tokens, and none of it may be shown."""
    full, _ = streamed(client, messages=HELLO, max_tokens=24)
    stop = full[7:12]
    request = {"messages": HELLO, "max_tokens": 24, "stop": ["no such words", stop]}
    if stream:
        text, chunks = streamed(client, **request)
        finish = chunks[-1].choices[0].finish_reason
    else:
        answer = client.chat.completions.create(model=NAME, **request)
        text, finish = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert text == full[: full.index(stop)]
    assert finish == "stop"


def test_what_only_looks_like_a_stop_string_is_shown(client):
    full, _ = streamed(client, messages=HELLO, max_tokens=24)
    text, chunks = streamed(client, messages=HELLO, max_tokens=24, stop=full[-4:] + "~")
    assert text == full and chunks[-1].choices[0].finish_reason == "length"


def test_drawing_follows_the_seed(client):
    def draw(**how) -> str:
        answer = client.chat.completions.create(model=NAME, messages=HELLO, max_tokens=24, **how)
        return answer.choices[0].message.content

    assert draw(temperature=1, seed=5) == draw(temperature=1.0, seed=5) != draw(temperature=1, seed=6)
    assert draw(temperature=1) != draw(temperature=1), "without a seed each answer is drawn anew"
    assert draw() == draw(temperature=0) == draw(temperature=1, top_p=0, seed=-1) == draw(temperature=1e-30)


def test_parts_of_text_and_the_clients_own_message_are_read(client):
    """Clients hand back the message they got, with all its empty fields."""
    first = client.chat.completions.create(model=NAME, messages=HELLO, max_tokens=5)
    parts = [{"type": "text", "text": "And "}, {"type": "text", "text": "then?"}]
    turns = [*HELLO, first.choices[0].message, {"role": "user", "content": parts}]
    plain = [*HELLO, {"role": "assistant", "content": first.choices[0].message.content}]
    plain.append({"role": "user", "content": "And then?"})
    again = [client.chat.completions.create(model=NAME, messages=each, max_tokens=9) for each in (turns, plain)]
    assert again[0].choices[0].message.content == again[1].choices[0].message.content
    assert again[0].usage == again[1].usage


def test_parameters_that_ask_for_nothing_are_taken(client):
    """Programs send them unasked."""
    idle = {"n": 1, "frequency_penalty": 0, "presence_penalty": 0.0, "logprobs": False, "user": "me", "tools": []}
    idle["response_format"] = {"type": "text"}
    with_idle = client.chat.completions.create(model=NAME, messages=HELLO, max_tokens=5, **idle)
    without = client.chat.completions.create(model=NAME, messages=HELLO, max_tokens=5)
    assert with_idle.choices[0].message.content == without.choices[0].message.content


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"extra_body": {"top_k": 5}}, "top_k"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         "messages[0].content"),
        ({"messages": [*HELLO, {"role": "tool", "content": "4", "tool_call_id": "1"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": "x", "name": "Ann"}]}, "messages[0].name"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5.5}, "max_tokens"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": -1}, "top_p"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": ""}, "stop[0]"),
        ({"stream_options": {"include_everything": True}}, "stream_options.include_everything"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_is_not_honoured_is_refused_by_name(client, change, param):
    """A parameter that is passed over in silence gives wrong answers that look right."""
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(**chat(**change))
    assert refusal.value.param == param
    assert refusal.value.type == "invalid_request_error"
    assert param in refusal.value.message


def test_two_limits_that_differ_are_refused(client):
    with pytest.raises(openai.BadRequestError, match="max_completion_tokens"):
        client.chat.completions.create(**chat(max_tokens=4, max_completion_tokens=5))


def test_another_model_is_not_found_and_not_loaded(client):
    with pytest.raises(openai.NotFoundError) as refusal:
        client.chat.completions.create(**chat(model="gpt-4o"))
    assert (refusal.value.code, refusal.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError) as refusal:
        client.models.retrieve("HuggingFaceTB/SmolLM2-135M")
    assert refusal.value.code == "model_not_found"


def test_the_one_model_is_listed(client):
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).object == "model"


def test_a_prompt_that_fills_the_context_is_refused_and_one_that_nearly_does_is_cut(client):
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(**chat(messages=[{"role": "user", "content": "word " * 200}]))
    assert refusal.value.code == "context_length_exceeded"
    assert str(CONTEXT) in refusal.value.message
    answer = client.chat.completions.create(**chat(max_tokens=100_000))
    assert answer.usage.total_tokens == CONTEXT
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'"x"', b'{"model": NaN}', b'{"messages": "\\ud800"}', b"\xff", b"[" * 100_000]
)
def test_what_is_no_json_object_is_a_bad_request(url, body):
    status, answer = send(url, body)
    assert status == 400
    assert answer["error"].keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", ["/v1/completions", "/load_model", "/reset", "/docs", "/", "/chat/completions"])
def test_there_is_nothing_else(url, path):
    """transformers' own server would load whatever it is asked to."""
    status, answer = send(url, {}, path)
    assert status == 404 and answer["error"]["type"] == "invalid_request_error"


def test_another_method_is_refused_in_the_same_shape(url):
    assert send(url, None, method="GET")[0] == 405
    assert send(url, {}, "/v1/models")[1]["error"]["code"] == "unknown_url"


def test_it_says_that_it_is_well(url):
    assert send(url, None, "/health", method="GET") == (200, {"status": "ok"})


def test_other_content_types_and_endless_bodies_are_refused(url):
    """A page can send a form or plain text to any address without asking first."""
    assert send(url, chat(), content_type="text/plain")[0] == 415
    assert send(url, b" " * (MAX_BODY_BYTES + 1))[0] == 413


def test_two_at_once_are_both_answered(client, reference):
    questions = [[{"role": "user", "content": text}] for text in QUESTIONS if "<|" not in text] * 2
    with ThreadPoolExecutor(len(questions)) as pool:
        jobs = [pool.submit(streamed, client, messages=messages, max_tokens=16) for messages in questions]
        found = [job.result()[0] for job in jobs]
    assert found == [reference.spell(reference.answer(messages, 16)) for messages in questions]


def test_who_comes_second_waits_and_is_then_answered():
    letters = Letters()
    with served(letters) as url, ThreadPoolExecutor(2) as pool:
        first = pool.submit(streamed, client_of(url), messages=HELLO, max_tokens=3)
        wait_until(lambda: letters.num_begun == 1)
        second = pool.submit(client_of(url).chat.completions.create, **chat(max_tokens=2))
        # Requests that ask nothing of the model do not wait for it.
        assert send(url, None, "/health", method="GET")[0] == 200
        with pytest.raises(openai.BadRequestError, match="the template refuses this; say something else"):
            client_of(url).chat.completions.create(**chat(messages=[{"role": "user", "content": "refuse"}]))
        letters.may_write.release(5)
        assert first.result()[0] == "abc"
        assert second.result().choices[0].message.content == "ab"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_the_model(stream):
    """Otherwise one closed window holds the model for a thousand tokens."""
    letters = Letters()
    with served(letters) as url:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=20)
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(chat(stream=stream)), {"content-type": "application/json"}
        )
        letters.may_write.release(3)
        wait_until(lambda: letters.num_written == 3)
        if stream:
            answer = connection.getresponse()
            assert b'"assistant"' in answer.readline()
            answer.close()
        connection.close()
        time.sleep(0.3)  # the time it takes to hear of it
        letters.may_write.release(1)
        assert letters.is_closed.wait(10)
        assert letters.num_written == 4
        letters.may_write.release(2)
        again = client_of(url).chat.completions.create(**chat(max_tokens=2))
        assert again.choices[0].message.content == "ab"


def test_a_client_that_leaves_the_queue_is_never_answered():
    letters = Letters()
    with served(letters) as url, ThreadPoolExecutor(1) as pool:
        first = pool.submit(streamed, client_of(url), messages=HELLO, max_tokens=2)
        wait_until(lambda: letters.num_begun == 1)
        with pytest.raises(openai.APITimeoutError):
            client_of(url).with_options(timeout=0.3).chat.completions.create(**chat())
        time.sleep(0.3)  # the time it takes to hear of it
        letters.may_write.release(2)
        assert first.result()[0] == "ab"
        letters.may_write.release(1)
        assert client_of(url).chat.completions.create(**chat(max_tokens=1)).choices[0].message.content == "a"
        assert letters.num_begun == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_is_told_in_openais_shape_and_the_next_is_answered(speaker, stream, monkeypatch):
    def fail(*_, **__):
        yield 5
        raise RuntimeError("secret words of somebody else")

    with served(speaker) as url, monkeypatch.context() as patched:
        patched.setattr(speaker, "generate", fail)
        with pytest.raises(openai.APIError) as failure:
            list(client_of(url).chat.completions.create(**chat(stream=stream)))
        assert "RuntimeError" in failure.value.message and "secret" not in str(failure.value)
        patched.undo()
        assert client_of(url).chat.completions.create(**chat(max_tokens=2)).usage.completion_tokens == 2


def wait_until(is_so) -> None:
    end = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.01)
