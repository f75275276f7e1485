"""`index`, `ask`, `chat --index` and `serve --index` as commands."""

import io
import json
from pathlib import Path

import pytest
from serving import NAME, client_of, send, served
from toy_index import COLLEGE, HashedWords

from parrots import write_parrot
from tunewell.cli.main import main
from tunewell.features.retrieval.answer import PassageFinder
from tunewell.features.retrieval.search import open_retriever
from tunewell.features.serve.queue import ServedModel
from tunewell.inference.chat_model import open_chat_model
from tunewell.runs.resolve import resolve_model


@pytest.fixture(autouse=True)
def embedder(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("tunewell.features.retrieval.index_workflow", "tunewell.features.retrieval.search"):
        monkeypatch.setattr(f"{module}.open_embedder", lambda name: HashedWords())


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with short notes, which fit in the context of a tiny model."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "gate.md").write_text("# Gate\n\nIt opens at 7.\n")
    (folder / "pool.txt").write_text("The pool is warm.\n")
    (folder / "photo.png").write_bytes(b"\x89PNG")
    return folder


def test_index_says_what_became_of_each_file_and_the_next_command(notes, capsys):
    assert main(["index", "notes"]) == 0
    screen = capsys.readouterr().out
    assert "2 of 3 indexed" in screen and "2 in index" in screen and "notes/photo.png" in screen
    assert screen.rstrip().endswith('next: `tunewell ask --index index "QUESTION"`')
    (notes / "gate.md").write_text("# Gate\n\nIt opens at 8.\n")
    assert main(["index", "notes", "--json"]) == 0
    payload = json.loads(capsys.readouterr().out)
    assert payload["counts"]["embedded"] == 1 and payload["counts"]["skipped"] == {"unsupported": 1}


def test_index_chooses_settings_on_questions(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [json.loads(line) for line in (COLLEGE / "train.jsonl").read_text().splitlines()]
    facts = {fact["answer"]: fact["value"] for fact in map(json.loads, (COLLEGE / "facts.jsonl").open())}
    with Path("short.jsonl").open("w") as file:
        for row in rows:
            file.write(json.dumps({"question": row["instruction"], "answer": facts[row["output"]]}) + "\n")
    assert main(["index", str(COLLEGE / "pages"), "--questions", "short.jsonl"]) == 0
    assert "of the answerable questions" in " ".join(capsys.readouterr().out.split())
    assert main(["index", str(COLLEGE / "pages"), "--questions", "nowhere.jsonl"]) == 2
    assert main(["index", str(COLLEGE / "pages"), "--questions", "short.jsonl", "--open-book", "book", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["open_book"]
    for name in ("train", "held_out"):
        lines = Path("book", f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        assert len(lines) == told[name] and "Question: " in json.loads(lines[0])["messages"][0]["content"]
    assert main(["index", str(COLLEGE / "pages"), "--open-book", "book"]) == 2


def test_the_questions_are_no_document(notes, capsys):
    """With `index .`, the search found the questions themselves, and its settings were chosen on that."""
    rows = [{"question": f"When does gate {n} open?", "answer": f"At {n} sharp."} for n in range(30)]
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["index", ".", "--questions", "./train.jsonl"]) == 2, "no document answers them"
    assert "only 0 of 30 questions" in " ".join(capsys.readouterr().err.split())
    assert main(["index", ".", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["counts"]["indexed"] == 3


def test_ask_prints_the_answer_and_its_sources(notes, tiny_model, tmp_path, capsys):
    main(["index", "notes"])
    model = write_parrot(tmp_path / "parrot", tiny_model, "seven [1]")
    capsys.readouterr()
    assert main(["ask", "When does the gate open?", "--model", str(model), "--show"]) == 0
    screen = capsys.readouterr().out
    assert screen.startswith("seven [1]\n\nsources:\n[1] Gate (notes/gate.md, line 3)\n    “It opens at 7.”")
    assert "Question: When does the gate open?" in screen
    assert main(["ask", "When does the gate open?", "--model", str(model), "--json"]) == 0
    payload = json.loads(capsys.readouterr().out)
    assert payload["answer"] == "seven [1]" and not payload["refused"]
    assert payload["sources"][0] | {"score": 0} == {
        "number": 1,
        "file": "notes/gate.md",
        "heading": "Gate",
        "lines": "line 3",
        "text": "It opens at 7.",
        "quote": "It opens at 7.",
        "cited": True,
        "score": 0,
    }
    assert main(["chat", str(model), "--index", "index", "--prompt", "When does the gate open?"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "seven [1]\n" and "notes/gate.md" in printed.err
    assert main(["ask", "When?", "--index", "nowhere", "--model", str(model)]) == 2
    assert "tunewell index DOCUMENTS --out nowhere" in capsys.readouterr().err


def test_a_refused_question_shows_nothing_of_the_answer_before(notes, tiny_model, tmp_path, capsys, monkeypatch):
    """The counts and the base model's answer were those of the question before, and `--show` printed an empty text."""
    monkeypatch.setattr(HashedWords, "unrelated_cosine", 0.15)
    main(["index", "notes"])
    model = write_parrot(tmp_path / "parrot", tiny_model, "seven")
    base = write_parrot(tmp_path / "base", tiny_model, "nine")
    asked, refused = "When does the gate open?", "Who discovered penicillin in London?"
    capsys.readouterr()
    command = ["chat", str(model), "--index", "index", "--with-base", "--base", str(base)]
    for json_option in ([], ["--json"]):
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{asked}\n{refused}\n"))
        assert main([*command, *json_option]) == 0
        out = capsys.readouterr().out
        if not json_option:
            assert out.count("nine") == 1 and out.endswith("Not in the documents.\n"), out
    first, second = map(json.loads, out.splitlines())
    assert first["tokens"] and first["base"]["answer"] == "nine" and not first["refused"]
    assert second["refused"] and not second["tokens"] and second["base"] is None
    assert main(["ask", refused, "--model", str(model), "--show"]) == 0
    assert capsys.readouterr().out.endswith("The model was not asked.\n")


def test_a_server_returns_the_sources_in_a_field_of_its_own(notes, tiny_model, tmp_path):
    main(["index", "notes"])
    model = open_chat_model(resolve_model(write_parrot(tmp_path / "parrot", tiny_model, "seven")), device="cpu")
    finder = PassageFinder(open_retriever("index"))
    asked = [{"role": "user", "content": "When does the gate open?"}]
    with served(ServedModel(model, NAME, add_passages=finder.add_passages)) as url:
        status, body = send(url, {"model": NAME, "messages": asked})
        assert status == 200 and body["choices"][0]["message"]["content"] == "seven"
        assert [source["file"] for source in body["sources"]] == ["notes/gate.md"], "the other does not fit"
        assert body["usage"]["prompt_tokens"] > 50, "the passages are part of the prompt"
        stream = client_of(url).chat.completions.create(model=NAME, messages=asked, stream=True)
        chunks = list(stream)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "seven"
        assert [source["file"] for source in chunks[-1].sources] == ["notes/gate.md"]
        status, body = send(url, {"model": NAME, "messages": [*asked, {"role": "assistant", "content": "x"}]})
        assert status == 400 and "last message" in body["error"]["message"]
