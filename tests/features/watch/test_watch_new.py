"""From rows to a config: the questions of `init` one at a time, and the same file as `init` writes."""

import json
import shlex
import shutil
import time
from pathlib import Path

import pytest

from tunewell.cli.main import main
from tunewell.core.errors import UserError
from tunewell.features.watch.draft import Recognition, commands, draft, read
from tunewell.features.watch.reader import Reader
from tunewell.workflows.init import init

_ROWS = [("Nr", "Frage", "Antwort", "Stand")]
_ROWS += [(str(n), f"Was kostet Möbel {n}?", f"Es kostet {n * 7} Euro, geprüft.", f"Stand {n * 31}") for n in range(30)]
_SHAPE = {"model_type": "llama", "vocab_size": 512, "hidden_size": 16, "intermediate_size": 32}
_SHAPE |= {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 512}
_CHAT = "".join(
    f"[0{1 + n % 9}.02.24, 10:{n % 60:02}:00] {name}: {text} {n}\n"
    for n in range(40)
    for name, text in (("Anna", "Hast du Zeit?"), ("Bert", "Ja, um"))
)


def ask_all(data: str, answers: list[str]) -> list[str]:
    """Answer one question after another, and return their texts."""
    texts = []
    for number in range(len(answers) + 1):
        found = read({"data": data, "answers": answers[:number]}, lambda _: None)
        if found["question"] is None:
            assert number == len(answers)
            break
        assert found["rows"]["rows"] or found["rows"]["conversations"]
        texts.append(found["question"]["text"])
    return texts


@pytest.mark.parametrize(
    ("name", "data", "answers", "flags"),
    [
        (
            "rows.csv",
            "\n".join(";".join(row) for row in _ROWS).encode("cp1252"),
            ["cp1252", "Frage", "Antwort"],
            None,
        ),
        (
            "rows.csv",
            "\n".join(";".join(row) for row in _ROWS).encode("cp1252"),
            ["mac_roman", "Antwort", "Frage"],
            ["--encoding", "mac_roman", "--columns", "question=Antwort,answer=Frage"],
        ),
        ("chat.txt", _CHAT.encode(), ["Bert"], ["--set", "data.sources[0].assistant=Bert"]),
    ],
    ids=["as found", "as nobody would guess", "an exported chat"],
)
def test_the_page_writes_what_init_writes(tmp_path, monkeypatch, tiny_model, name, data, answers, flags):
    """Guards against a config of the page that differs from that of the shown command by a byte."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model, tmp_path / "tiny")
    (tmp_path / name).write_bytes(data)
    assert len(ask_all(name, answers)) == len(answers)
    request = {"data": name, "answers": answers, "model": "tiny", "name": "mine", "settings": {"train.epochs": 2}}
    known = commands(Recognition(request, lambda _: None), request)
    words = shlex.split(known["commands"][0])[1:]
    if flags is not None:
        assert words[4:-4] == flags
    out = Path("mine/tunewell.yaml")
    drafted = init(**known["init"], is_draft=True)
    assert not out.exists()
    assert main([*words, "--json"]) == 0
    assert out.read_text(encoding="utf-8") == drafted.text


def test_an_answer_that_was_not_offered_is_refused(tmp_path, monkeypatch):
    """Guards against a column name that the page made up."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text("\n".join(";".join(row) for row in _ROWS), encoding="utf-8")
    with pytest.raises(UserError, match="is not an answer"):
        read({"data": "rows.csv", "answers": ["../../x"]}, lambda _: None)


def test_what_the_model_sees_is_text_and_not_bytes(tmp_path, monkeypatch, tiny_model):
    """Guards against `<20 4B C3>` in place of a word: a byte-level tokenizer splits an umlaut into two tokens."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model, tmp_path / "tiny")
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(_SHAPE))
    (tmp_path / "rows.csv").write_text("\n".join(";".join(row) for row in _ROWS), encoding="utf-8")
    request = {"data": "rows.csv", "answers": ["Frage", "Antwort"], "model": "tiny", "name": "mine", "settings": None}
    seen = "".join(token["text"] for token in draft(request, lambda _: None)["sees"][0]["tokens"])
    assert "Was kostet Möbel" in seen
    assert "geprüft." in seen


def test_one_process_answers_every_request_and_ends_when_it_is_idle(tmp_path, monkeypatch):
    """Guards against seconds of imports at each question, and against a process that stays."""
    (tmp_path / "rows.csv").write_text("\n".join(";".join(row) for row in _ROWS), encoding="utf-8")
    request = {"act": "read", "data": "rows.csv", "answers": [], "folder": str(tmp_path)}
    reader = Reader()
    assert reader.ask(request, lambda _: None)["question"]
    child = reader._idle
    with pytest.raises(UserError, match="is not an answer"):
        reader.ask(request | {"answers": ["x"]}, lambda _: None)
    monkeypatch.setattr("tunewell.features.watch.reader._IDLE_SECONDS", 0.1)
    assert reader.ask(request | {"answers": ["Frage", "Antwort"]}, lambda _: None)["number"] == 30
    assert child is not None
    until = time.monotonic() + 20
    while not child.has_ended and time.monotonic() < until:
        time.sleep(0.05)
    assert child.has_ended
    assert reader._idle is None


def test_a_request_that_is_given_up_leaves_no_process(tmp_path):
    """Guards against the answer to an old request, which the next request would get."""
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    reader = Reader()

    def leave(_):
        raise ConnectionError

    with pytest.raises(ConnectionError):
        reader.ask({"act": "read", "data": "rows.csv", "answers": [], "folder": str(tmp_path)}, leave)
    assert reader._idle is None
