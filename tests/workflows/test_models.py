"""`tunewell models`, `init` without a model, and a model of Ollama from the first word to a trained run."""

import json
from pathlib import Path
from typing import Any

import pytest
from llama_cpp_tiny import tiny_llama, write_tiny_gguf
from model_folders import add_to_hub_cache, add_to_ollama

from corpora import row, write_rows
from tunewell.cli.main import main
from tunewell.config.load import load_config
from tunewell.core.errors import UserError
from tunewell.core.questions import MenuQuestion
from tunewell.records.plan import read_plan
from tunewell.runs.config import RunOptions
from tunewell.workflows import models as workflow
from tunewell.workflows.train import run_training


@pytest.fixture
def project(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with rows, in a home folder where Ollama has one tiny model."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TUNEWELL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.setattr("tunewell.model_files.ollama._SYSTEM_FOLDER", tmp_path / "none")
    monkeypatch.setattr("tunewell.model_files.local._in_packages", lambda: iter(()))
    gguf = write_tiny_gguf(tmp_path / "tiny.bin", tiny_llama(tiny_model), tiny_model)
    add_to_ollama(tmp_path / ".ollama/models", "registry.ollama.ai/library/tiny/latest", gguf)
    folder = tmp_path / "project"
    folder.mkdir()
    write_rows(folder / "rows.jsonl", [row(number) for number in range(40)])
    monkeypatch.chdir(folder)
    return folder


def _json(capsys: pytest.CaptureFixture[str], *line: str) -> dict[str, Any]:
    assert main([*line, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_models_of_the_disk_and_of_the_catalogue_are_compared(project: Path, capsys: pytest.CaptureFixture[str]):
    found = _json(capsys, "models", "rows.jsonl")
    assert found["rows"]["number"] == 40 and found["machine"]["cores"] >= 1
    assert len(found["models"]) >= 12 and [own["name"] for own in found["local"]] == ["ollama:tiny"]
    for own in [*found["models"], *found["local"]]:
        assert own["peak_bytes"] > 0 and own["seconds"]["low"] < own["seconds"]["expected"] < own["seconds"]["high"]
    small = next(own for own in found["models"] if "135M" in own["name"])
    assert small["license"] == "Apache-2.0" and small["download_bytes"] == pytest.approx(2 * 134.5e6, rel=0.01)
    assert found["recommended"] == "ollama:tiny"  # the hub is offline


@pytest.mark.parametrize("columns", ["60", "120"])
def test_the_screen_fits_and_names_the_next_commands(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str
):
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["models", "rows.jsonl"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= int(columns)
    words = " ".join(out.split())
    assert "`tunewell init rows.jsonl --model ollama:tiny`" in words and "`tunewell chat ollama:tiny`" in words
    assert "Qwen/Qwen3-0.6B" in out and ("Apache-2.0" in out) == (columns == "120")


def test_a_model_in_the_hub_cache_is_marked_and_preferred(
    project: Path, capsys: pytest.CaptureFixture[str], tiny_model: Path
):
    """What is downloaded already needs no network; here with the weights of a tiny model in its place."""
    folder = project.parent / "made"
    tiny_llama(tiny_model).save_pretrained(folder)
    add_to_hub_cache(project.parent / "hub", "HuggingFaceTB/SmolLM2-135M-Instruct", folder)
    found = _json(capsys, "models", "rows.jsonl")
    own = next(own for own in found["models"] if "135M" in own["name"])
    assert own["on_disk"] == "hub cache" and own["download_bytes"] == 0
    assert found["recommended"] == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_rows_come_from_the_config_or_are_assumed(project: Path, capsys: pytest.CaptureFixture[str]):
    assert _json(capsys, "models")["rows"] == workflow_assumed()
    Path("tunewell.yaml").write_text("data: {sources: rows.jsonl}\n")
    assert _json(capsys, "models")["rows"]["number"] == 40


def workflow_assumed() -> dict[str, Any]:
    return {"data": None, "number": 500, "tokens": 100_000, "longest": 200, "language": None}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["models", "none.jsonl"], "there is no file or folder `none.jsonl`"),
        (["models", "empty.jsonl"], "has no rows"),
        (["models", "--model", "llama3.2"], "meta-llama/Llama-3.2-3B-Instruct"),
        (["models", "--model", "ollama:tinny"], "`ollama:tiny:latest`"),
        (["chat", "tiny", "--prompt", "hi"], "`ollama:tiny:latest`"),
        (["init", "rows.jsonl", "--model", "qwen3"], "did you mean"),
    ],
)
def test_bad_input_gets_a_plain_answer(
    project: Path, capsys: pytest.CaptureFixture[str], line: list[str], expected: str
):
    Path("empty.jsonl").write_text("")
    assert main(line) == 2
    assert expected in capsys.readouterr().err


def test_named_models_are_compared_alone(project: Path, capsys: pytest.CaptureFixture[str]):
    found = _json(capsys, "models", "rows.jsonl", "--model", "qwen/qwen3-0.6b", "--model", "ollama:tiny")
    assert [own["name"] for own in found["models"]] == ["Qwen/Qwen3-0.6B", "ollama:tiny"] and found["local"] == []


def test_init_without_a_model_takes_the_recommended_one(project: Path, capsys: pytest.CaptureFixture[str]):
    """A newcomer has rows, and no idea of models."""
    assert main(["init", "rows.jsonl"]) == 0
    said = capsys.readouterr()
    assert "model: ollama:tiny" in Path("tunewell.yaml").read_text() and "ollama:tiny" in said.err


def test_train_without_a_model_takes_the_same_one(project: Path, capsys: pytest.CaptureFixture[str]):
    """`tunewell train FILE` ended in "add `--model MODEL`", where MODEL was a placeholder."""
    assert main(["train", "rows.jsonl", "--no-supervisor", "--no-validate", "--set", "train.max_steps=1"]) == 0
    said = capsys.readouterr()
    assert load_config().config.model == "ollama:tiny" and "model: ollama:tiny: the largest on this disk" in said.err
    assert main(["train", "rows.jsonl", "--no-supervisor"]) == 2  # the config is there and has these rows
    assert "already contains a run" in capsys.readouterr().err


def test_a_download_is_asked_for_with_its_size(project: Path, monkeypatch: pytest.MonkeyPatch):
    """Enter takes the recommended model; the smallest one is offered; `none` ends the command."""
    asked: list[MenuQuestion] = []
    monkeypatch.setattr(workflow, "hub_problem", lambda: None)
    monkeypatch.delenv("HF_HUB_OFFLINE")

    def answer(number: int) -> str:
        def ask(question: MenuQuestion) -> str:
            asked.append(question)
            return question.options[number][0]

        return workflow.recommend_model("rows.jsonl", ask=ask)[0]

    names = [value for value, _ in (answer(0), asked[0])[1].options]
    assert names[0] == answer(0) and names[-1] == "none" and "SmolLM2-135M" in names[-2]
    assert all("to download" in text for _, text in asked[0].options[:-1])
    assert answer(len(names) - 2) == names[-2]
    with pytest.raises(UserError, match="no model was chosen"):
        answer(len(names) - 1)


def test_a_folder_that_is_not_there_is_no_model_of_the_hub(project: Path, capsys: pytest.CaptureFixture[str]):
    """`--model models/qwen` got "did you mean `Qwen/Qwen3-8B`?", which did not fit."""
    assert main(["init", "rows.jsonl", "--model", "models/qwen"]) == 2
    assert "Qwen3" not in capsys.readouterr().err
    Path("models/tiny").mkdir(parents=True)
    assert main(["init", "rows.jsonl", "--model", "models/qwen"]) == 2
    assert "`models` has the folders tiny" in " ".join(capsys.readouterr().err.split())


def test_a_model_of_ollama_is_trained_and_talked_to(project: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["chat", "ollama:tiny", "--prompt", "hi", "--length", "4", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["tokens"] >= 1 and answer["model"] == "ollama:tiny"
    assert main(["init", "rows.jsonl", "--model", "ollama:tiny"]) == 0
    capsys.readouterr()
    sets = ["train.max_steps=2", "device=cpu", "train.threads=1", "verdict.after_training=false"]
    result = run_training(load_config(None, sets), RunOptions())
    assert read_plan(result.run).model == "ollama:tiny" and "ollama:tiny" in (result.run / "README.md").read_text()
    assert main(["chat", str(result.run), "--prompt", "hi", "--length", "4"]) == 0


@pytest.mark.uses("notebook")
def test_a_model_of_ollama_is_not_in_a_notebook(project: Path, capsys: pytest.CaptureFixture[str]):
    """Colab would fail after the upload."""
    Path("tunewell.yaml").write_text("model: ollama:qwen3:0.6b\ndata: {sources: rows.jsonl}\n")
    assert main(["notebook", "--package", "none"]) == 2
    assert "did you mean `Qwen/Qwen3-0.6B`" in capsys.readouterr().err


def test_nothing_suits_is_said(project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(workflow, "recommend", lambda *_, **__: None)
    assert main(["models", "rows.jsonl"]) == 0
    assert "no model in the list is suitable" in capsys.readouterr().out
    assert main(["init", "rows.jsonl"]) == 2
    assert not Path("tunewell.yaml").exists()


def test_a_named_model_that_fits_is_not_unsuitable_because_the_hub_is_out_of_reach(
    project: Path, capsys: pytest.CaptureFixture[str]
):
    """The screen printed 6.5 of 21.7 GiB, then "no model is suitable" and advised a larger GPU."""
    assert main(["models", "rows.jsonl", "--model", "HuggingFaceTB/SmolLM2-135M-Instruct"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "suitable" not in shown and "larger GPU" not in shown
    assert "fits: HuggingFaceTB/SmolLM2-135M-Instruct; but it is not on this disk" in shown
    assert "hub cannot be reached" in shown
    assert "`tunewell init rows.jsonl --model HuggingFaceTB/SmolLM2-135M-Instruct`" in shown


def test_init_without_a_model_reads_the_rows_as_with_one(project: Path, capsys: pytest.CaptureFixture[str]):
    """A chat was refused before anybody could say whose messages count, and `rows.jsonl#5` was not found."""
    turns = [(day, who) for day in range(1, 10) for who in ("Ann", "Bob", "Ann")]
    (project / "_chat.txt").write_text("".join(f"[0{day}/02/2024, 10:15:32] {who}: Hi\n" for day, who in turns))
    assert _json(capsys, "models", "_chat.txt")["rows"]["number"] == 9
    assert main(["init", "_chat.txt"]) == 2
    assert load_config().config.data.sources[0].assistant == "?"
    assert main(["init", "_chat.txt", "--force", "--set", "data.sources[0].assistant=Bob"]) == 0
    assert load_config().config.data.sources[0].assistant == "Bob"
    assert main(["init", "rows.jsonl#5", "--force"]) == 0
    assert load_config().config.data.sources[0].limit == 5
