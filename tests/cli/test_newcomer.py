"""The first hour of four people at a terminal: from a file to a config, and from a file to a verdict."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from newcomer import Newcomer

from tunewell.cli.main import main
from tunewell.config.load import load_config

PLACES = ("Mensa", "Bibliothek", "Aula", "Werkstatt", "Küche", "Halle", "Turnhalle", "Kapelle")
NUM_ROWS = 40


def pairs() -> list[tuple[str, str]]:
    names = [(place, floor) for floor in range(NUM_ROWS // len(PLACES)) for place in PLACES]
    return [(f"Wo finde ich die {place} {floor}?", f"Die {place} ist im Gebäude {floor}.") for place, floor in names]


def german_csv(folder: Path) -> str:
    """A table as a German Excel saves it: cp1252, semicolons, headings that no format knows."""
    lines = ["Thema;Kunde schreibt;Wir schreiben", *(f"Wege;{question};{answer}" for question, answer in pairs())]
    (folder / "kunden.csv").write_bytes("\r\n".join(lines).encode("cp1252"))
    return "kunden.csv"


def sharegpt(folder: Path) -> str:
    turns = [[{"from": "human", "value": ask}, {"from": "gpt", "value": answer}] for ask, answer in pairs()]
    (folder / "chats.json").write_text(json.dumps([{"conversations": own} for own in turns]), encoding="utf-8")
    return "chats.json"


def markdown(folder: Path) -> str:
    (folder / "wiki").mkdir()
    for number, (question, answer) in enumerate(pairs()):
        text = f"# Seite {number}\n\n{answer} {question}\n\n{answer} Das steht hier, damit es auf der Seite steht.\n"
        (folder / "wiki" / f"seite{number}.md").write_text(text, encoding="utf-8")
    return "wiki"


def excel(folder: Path) -> str:
    from test_export_formats import write_workbook

    pytest.importorskip("python_calamine")
    rows = [[number, question, answer] for number, (question, answer) in enumerate(pairs())]
    write_workbook(folder / "faq.xlsx", {"FAQ": [["Nr", "Was man uns fragt", "Was wir sagen"], *rows]})
    return "faq.xlsx"


SETS = (german_csv, sharegpt, markdown, excel)
EXPECTED = {
    german_csv: {"encoding": "cp1252", "columns": {"question": "Kunde schreibt", "answer": "Wir schreiben"}},
    excel: {"columns": {"question": "Was man uns fragt", "answer": "Was wir sagen"}},
}


@pytest.mark.parametrize("make", [german_csv, excel, *(pytest.param(own, marks=pytest.mark.slow) for own in SETS[1:3])])
def test_a_newcomer_gets_a_config_by_pressing_enter(make: Callable[[Path], str], tmp_path, tiny_model):
    """Guards the proposals: the likeliest answer is the first, so that Enter is right for usual files."""
    person = Newcomer(tmp_path)
    data = make(tmp_path)
    assert person.run("init", data, "--model", str(tiny_model)) == 0, person.screens[-1]
    source = load_config(tmp_path / "tunewell.yaml").config.data.sources[0]
    assert source.model_dump(exclude_unset=True) == {"path": data, **EXPECTED.get(make, {})}
    assert bool(person.questions) == (make in EXPECTED)
    assert person.next_command == ["train"]


def test_wrong_answers_are_asked_again_and_columns_can_be_named(tmp_path, tiny_model):
    """Guards a typing error, which must not end the command or count as Enter."""
    words = {"please type a number": "wir schreiben", "is the question": "7", "is the answer": "Kunde schreibt"}
    person = Newcomer(tmp_path, words)
    assert person.run("init", german_csv(tmp_path), "--model", str(tiny_model)) == 0
    assert "please type a number from 1 to 4" in person.screens[-1]
    columns = load_config(tmp_path / "tunewell.yaml").config.data.sources[0].columns
    assert columns == {"question": "Wir schreiben", "answer": "Kunde schreibt"}


def write_weights(tokenizer: Path, folder: Path) -> Path:
    """Write a model of 100,000 random weights with the tiny tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=512, max_position_embeddings=512, **sizes)).save_pretrained(folder)
    PreTrainedTokenizerFast.from_pretrained(tokenizer).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("make", SETS)
def test_a_newcomer_gets_a_verdict_by_following_the_last_line(make: Callable[[Path], str], tmp_path, tiny_model):
    """Bar 1 of the first hour: from a file to a verdict, without editing, in under eight commands."""
    (tmp_path / "work").mkdir()
    person = Newcomer(tmp_path / "work")
    write_weights(tiny_model, tmp_path / "model")
    data = make(person.folder)
    assert person.run() == 0  # `tunewell` alone
    assert "`tunewell train" in person.screens[-1]
    assert person.run("init", data, "--model", "../model", "--set", "train.epochs=1") == 0
    code = person.run(*person.next_command)
    assert code in (0, 3, 4), person.screens[-1]  # every verdict has its exit code
    report = json.loads((person.folder / "run" / "report.json").read_text(encoding="utf-8"))
    assert report["verdict"] in ("PASS", "WEAK", "FAIL"), "40 rows are enough to judge"
    assert person.run() == 0
    assert f"verdict   {report['verdict']}: " in person.screens[-1]
    if report["verdict"] != "PASS":  # then it is `tunewell chat`, which waits for a person
        assert person.run(*person.next_command) in (0, 3, 4), "the advised command works as pasted"
    assert len(person.commands) < 8
    assert not any("error:" in screen for screen in person.screens)


@pytest.mark.slow
def test_train_without_init_writes_the_config_and_exports(tmp_path, tiny_model, monkeypatch):
    """Guards one command for everything; the config stays, so that `resume`, `validate` and a second run have it."""
    monkeypatch.chdir(tmp_path)
    write_weights(tiny_model, tmp_path / "model")
    data = sharegpt(tmp_path)
    person = Newcomer(tmp_path)
    code = person.run(
        "train", data, "--model", "model", "--set", "train.epochs=1", "--no-validate", "--export", "merged"
    )
    assert code == 0, person.screens[-1]
    assert "PROVEN" in person.screens[-1] and (tmp_path / "run" / "export" / "proof.json").is_file()
    assert load_config().config.data.sources[0].path == data
    assert main(["train", "other.json", "--model", "model"]) == 2  # another file needs another config
