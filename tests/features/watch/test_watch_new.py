"""From rows to a config: the questions of `init` one at a time, and the same file as `init` writes."""

import shlex
import shutil
from pathlib import Path

import pytest

from tunewell.cli.main import main
from tunewell.core.errors import UserError
from tunewell.features.watch.draft import Recognition, commands, read
from tunewell.workflows.init import init

_ROWS = [("Nr", "Frage", "Antwort", "Stand")]
_ROWS += [(str(n), f"Was kostet Möbel {n}?", f"Es kostet {n * 7} Euro, geprüft.", f"Stand {n * 31}") for n in range(30)]
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
    draft = init(**known["init"], is_draft=True)
    assert not out.exists()
    assert main([*words, "--json"]) == 0
    assert out.read_text(encoding="utf-8") == draft.text


def test_an_answer_that_was_not_offered_is_refused(tmp_path, monkeypatch):
    """Guards against a column name that the page made up."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text("\n".join(";".join(row) for row in _ROWS), encoding="utf-8")
    with pytest.raises(UserError, match="is not an answer"):
        read({"data": "rows.csv", "answers": ["../../x"]}, lambda _: None)
