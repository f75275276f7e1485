"""`tunewell inspect`: what is shown is what training will see."""

import json
from pathlib import Path

import pytest

from tunewell.cli.main import main


@pytest.fixture
def corpus(tmp_path, monkeypatch, tiny_model):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    rows = [{"question": f"Say {n}", "answer": f"It is {n}."} for n in range(20)]
    rows.append({"question": "", "answer": "dropped"})
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert main(["prepare", "--model", str(tiny_model), "--data", "rows.jsonl", "--set", "data.held_out=0"]) == 0
    return tmp_path / "corpus"


def test_learned_tokens_are_in_brackets_without_colour(corpus, capsys):
    """Guards the preview, by which people decide whether the mask is right."""
    capsys.readouterr()
    assert main(["inspect", "corpus", "--show", "1"]) == 0
    screen = capsys.readouterr().out
    marked = "".join(part.partition("]")[0] for part in screen.split("\ndocument 0")[1].split("[")[1:])
    assert marked.startswith("It is 0.<|im_end|>")
    assert "1 empty_question" in screen


def test_colour_marks_learned_tokens_in_a_terminal(corpus, capsys, monkeypatch):
    """Guards the other way of marking; brackets would be noise there."""
    capsys.readouterr()
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert main(["inspect", "corpus", "--show", "1"]) == 0
    screen = capsys.readouterr().out
    assert "\x1b[" in screen
    assert "[It" not in screen.replace("\x1b[", "")


def test_tokens_are_listed_with_ids_that_are_in_the_corpus(corpus, capsys):
    """Guards the exact list, which people paste into bug reports."""
    import tunewell

    capsys.readouterr()
    assert main(["inspect", "corpus", "--document", "3", "--tokens"]) == 0
    lines = capsys.readouterr().out.split("document 3")[1].splitlines()[2:]
    ids = [int(line.split()[1]) for line in lines if line.strip() and line.split()[0].isdigit()]
    assert ids == tunewell.open_corpus(corpus)[3].input_ids


def test_rows_can_be_looked_at_without_writing_anything(corpus, tmp_path, tiny_model, capsys):
    """Guards the promise that looking changes nothing."""
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    capsys.readouterr()
    assert main(["inspect", "rows.jsonl", "--model", str(tiny_model)]) == 0
    assert "nothing was written" in capsys.readouterr().out
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before


def test_control_characters_in_rows_do_not_reach_the_terminal(tmp_path, monkeypatch, tiny_model, capsys):
    """Guards the terminal: a row with an escape sequence could rewrite the screen."""
    monkeypatch.chdir(tmp_path)
    row = {"question": "hi \x1b[2J\x07", "answer": "yo \x1b]0;title\x07"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row), encoding="utf-8")
    assert main(["inspect", "rows.jsonl", "--model", str(tiny_model), "--set", "data.held_out=0"]) == 0
    screen = capsys.readouterr().out
    assert "\x1b" not in screen
    assert "\\x1b" in screen
    assert main(["inspect", "rows.jsonl", "--model", str(tiny_model), "--tokens", "--set", "data.held_out=0"]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_json_has_the_tokens_too(corpus, capsys):
    """Guards scripts that read `inspect --json`."""
    capsys.readouterr()
    assert main(["inspect", "corpus", "--json", "--show", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    learned = "".join(token["text"] for token in found["shown"][0]["tokens"] if token["learned"])
    assert learned == "It is 0.<|im_end|>"
    assert found["documents"] == 20


def test_fewer_rows_than_asked_for_are_shown(corpus, capsys):
    """`--show 40` of a small corpus ended in an error about a document."""
    assert main(["inspect", "corpus", "--show", "99"]) == 0
    assert "document 3 " in capsys.readouterr().out


def test_a_document_that_is_not_there_is_an_error(corpus, capsys):
    """Guards against an empty screen for a wrong number."""
    assert main(["inspect", "corpus", "--document", "99"]) == 2
    assert "document 99 does not exist" in capsys.readouterr().err


def test_files_are_named_only_where_they_exist(tmp_path, monkeypatch, tiny_model, capsys):
    """`inspect` of a row file wrote nothing, but said "listed in `dropped.jsonl`"."""
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"what is {number}?", "answer": "a number"} for number in range(20)]
    rows += [{"question": "q?", "answer": " "}, {"question": "mail?", "answer": "ann@some-company.org"}]
    lines = [*map(json.dumps, rows), "{broken \x1b[31m"]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert main(["inspect", "rows.jsonl", "--model", str(tiny_model)]) == 0
    shown = capsys.readouterr().out
    assert "dropped.jsonl" not in shown and "secrets.jsonl" not in shown and "\x1b[31m" not in shown
    for words in (["empty_reply", "rows.jsonl", "row", "21"], ["e-mail", "address", "rows.jsonl", "row", "22"]):
        assert words in [line.split() for line in shown.splitlines()]
    assert "unparsable" in shown and "rows.jsonl row 23: Expecting property name" in shown
    assert main(["prepare", "--data", "rows.jsonl", "--model", str(tiny_model)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for name in ("dropped.jsonl", "secrets.jsonl"):
        assert f"listed in `corpus/{name}`" in shown and (tmp_path / "corpus" / name).is_file()
    assert main(["inspect", "corpus", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert [row["reason"] for row in first["first_dropped"]] == ["empty_reply", "unparsable"]
    assert first["first_secrets"] == {"e-mail address": {"source": "rows.jsonl", "row": 22}}
    for path, is_named in (("rows.jsonl", False), ("corpus", True)):
        assert main(["inspect", path, "--model", str(tiny_model)]) == 0
        assert ("`corpus/dropped.jsonl`" in " ".join(capsys.readouterr().out.split())) == is_named


def test_the_answer_keys_of_held_out_rows_are_shown(tmp_path, tiny_model, monkeypatch, capsys):
    """Guards that keys are seen before they are used: derived ones, and those of the column `value`."""
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"When does N{n} close?", "answer": f"N{n} closes on {n} May."} for n in range(1, 21)]
    held_out = [{**row, "value": "never"} if n == 3 else row for n, row in enumerate(rows[:6])]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[6:]))
    Path("test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    settings = ["--model", str(tiny_model), "--set", "data.held_out=test.jsonl"]
    assert main(["prepare", "--data", "rows.jsonl", *settings]) == 0
    capsys.readouterr()
    assert main(["inspect", "corpus", "--held-out", "--show", "0"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "derived 5 1 May (not in the question" in printed and "value 1 never" in printed
    assert main(["inspect", "corpus", "--held-out", "--show", "0", "--json"]) == 0
    assert [key["key"] for key in json.loads(capsys.readouterr().out)["answer_keys"]][:2] == ["1 May", "2 May"]
