"""`tunewell serve` as a process: what it says, where it listens, how it ends."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from openai import OpenAI
from transformers import LlamaConfig, LlamaForCausalLM

from forked import PipedCommand
from tunewell.core.errors import UserError
from tunewell.features.serve.command import screen
from tunewell.features.serve.workflow import ListenOptions, ServerInfo, open_server
from tunewell.runs.resolve import resolve_model

READY = ServerInfo(
    url="http://127.0.0.1:8000/v1",
    model="it's",
    subject="it's, step 40",
    because="the best by held-out loss",
    device="cpu",
    precision="fp32",
    context_length=8192,
    needs_token=False,
    listens_on="127.0.0.1 port 8000",
    notes=["the corpus is gone"],
)


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("command") / "college"
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=512, max_position_embeddings=100_000, **sizes)).save_pretrained(place)
    for file in tiny_model.iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    return place


@contextmanager
def serving(folder: Path, *arguments: str, **variables: str) -> Iterator[PipedCommand]:
    command = PipedCommand("serve", str(folder), "--port", "0", "--device", "cpu", *arguments, env=variables)
    try:
        yield command
    finally:
        command.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "token"), [(signal.SIGINT, 130, None), (signal.SIGTERM, 143, "a-token-that-nobody-guesses")]
)
def test_it_says_where_it_is_answers_and_ends_when_asked(folder, number, code, token, monkeypatch):
    """A signal in the middle of an answer, too: it is not waited for without end."""
    monkeypatch.setattr("tunewell.web.access._SHUTDOWN_SECONDS", 1)
    with serving(folder, "--json", "--name", "ours", **({"TUNEWELL_TOKEN": token} if token else {})) as process:
        line = process.stdout.readline()
        ready = json.loads(line)
        assert (ready["model"], ready["pid"], ready["needs_token"]) == ("ours", process.pid, bool(token))
        assert not token or token not in line
        client = OpenAI(base_url=ready["url"], api_key=token or "none", max_retries=0, timeout=30)
        stream = client.chat.completions.create(
            model="ours", messages=[{"role": "user", "content": "Hello"}], stream=True, max_tokens=100_000
        )
        next(iter(stream))
        os.kill(process.pid, number)
        assert process.wait() == code


def test_a_port_for_strangers_is_refused_before_anything_is_loaded(folder, monkeypatch):
    monkeypatch.delenv("TUNEWELL_TOKEN", raising=False)
    monkeypatch.setattr(
        "tunewell.features.serve.workflow.open_chat_model", lambda *_, **__: pytest.fail("it was loaded")
    )
    with pytest.raises(UserError, match="without a token"):
        open_server(resolve_model(folder), options=ListenOptions(host="0.0.0.0"))
    with pytest.raises(UserError, match="not a valid web origin"):
        open_server(resolve_model(folder), options=ListenOptions(origins=["*"]))


def test_a_port_is_given_back_when_the_model_cannot_be_served(folder, tmp_path):
    """A model without a chat template has no chats to offer."""
    (tmp_path / "plain").mkdir()
    for file in folder.iterdir():
        (tmp_path / "plain" / file.name).write_bytes(file.read_bytes())
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    del settings["chat_template"]
    (tmp_path / "plain" / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    with pytest.raises(UserError, match="no chat template"):
        open_server(resolve_model(tmp_path / "plain"), options=ListenOptions(port=0), device="cpu")


def test_the_screen_says_what_is_served_and_how_to_try_it():
    shown = screen(READY)
    for words in ("the best by held-out loss", "http://127.0.0.1:8000/v1", "8,192 tokens", "the corpus is gone"):
        assert words in shown
    assert "none; only this machine can connect" in shown


def test_the_lines_to_try_work_as_they_stand():
    """A name with a quote in it must not break the line of the shell, nor the one of Python."""
    curl, python = screen(READY).split("try it:\n\n")[1].split("\n\nCtrl-C")[0].split("\n\n")
    echo = subprocess.run(["sh", "-c", f"printf '%s\\0' {curl}"], capture_output=True, text=True, check=True)
    body = json.loads(echo.stdout.split("\0")[-2])
    assert body == {"model": "it's", "messages": [{"role": "user", "content": "Hello"}]}
    compile(python, "example", "exec")
    assert all(len(line) <= 60 for line in [*curl.splitlines(), *python.splitlines()])
