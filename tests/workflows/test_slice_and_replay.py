"""Whole runs with a selection slice and with replay: exact resume, and held-out rows that decide nothing."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny import write_tiny_model
from transformers import AutoModelForCausalLM, LlamaConfig

import tunewell
from corpora import write_rows
from tunewell.core.errors import UserError
from tunewell.data.corpus import reader
from tunewell.data.tokenizers.load import load_tokenizer
from tunewell.inference.decoder import Generated
from tunewell.planning import compute
from tunewell.records.events import read_events
from tunewell.records.plan import Chosen, read_plan
from tunewell.runs.resolve import resolve_model
from tunewell.runs.result import TrainResult
from tunewell.training import replay as replay_module

_CONFIG: dict[str, Any] = {
    "model": "base",
    "device": "cpu",
    "data": {"sources": "rows.jsonl", "held_out": 0.2, "selection": 0.2},
    "method": {"rank": 4, "alpha": 8},
    "train": {"max_steps": 6, "batch_documents": 8, "threads": 1, "learning_rate": 5e-3, "replay": 0.1},
    "evaluate": {"every_steps": 2, "samples": 2, "sample_tokens": 3},
    "checkpoints": {"every_steps": 2, "keep": 9},
    "verdict": {"after_training": False},
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base model and 120 rows with four labels."""
    folder = tmp_path_factory.mktemp("project")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    num_tokens = load_tokenizer(write_tiny_model(folder / "base")).vocab_size
    AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=num_tokens, **sizes)).save_pretrained(folder / "base")
    chance = random.Random(0)
    rows = [{"question": f"Case {n}: {chance.random():.6f}?", "answer": f"kind {n % 4}"} for n in range(120)]
    write_rows(folder / "rows.jsonl", rows)
    return folder


@pytest.fixture(autouse=True)
def _inside(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace the answers of the base model, which is random; the list has the number of prompts of each call."""
    calls = list[int]()

    def generate(model: Any, prompts: Any, **_: Any) -> list[Generated]:
        calls.append(len(prompts))
        words = [list(f"Answer {number} of mine.".encode()) for number in range(len(prompts))]
        return [Generated(ids, ended=number % 2 == 0) for number, ids in enumerate(words)]

    monkeypatch.setattr(replay_module, "generate", generate)
    return calls


def _train(out: str, *, resume: bool = False, **changes: dict[str, Any]) -> TrainResult:
    config = {name: own | changes.get(name, {}) if isinstance(own, dict) else own for name, own in _CONFIG.items()}
    return tunewell.train(config | {"corpus": f"corpus-{out}"}, out=out, resume=resume, progress=False)


def _weights(run: str, step: int) -> dict[str, torch.Tensor]:
    return load_file(Path(run) / "checkpoints" / f"step-{step:06d}" / "adapter_model.safetensors")


def _events(run: str, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(Path(run) / "events.jsonl") if event["kind"] == kind]


def test_a_resumed_run_with_slice_and_replay_is_the_uninterrupted_one(answers: list[int]) -> None:
    """Same documents in the same steps, same measures, same weights, although the cache of answers is gone."""
    whole = _train("whole")
    assert answers == [200] and whole.exit_code == 0
    assert any("replay: an epoch has " in note for note in whole.notes)
    plan = read_plan(Path("whole"))
    assert plan.replay is not None and plan.replay.value == 0.1 and plan.answers is not None
    for name in ("corpus-whole", "whole"):
        shutil.copytree(name, name.replace("whole", "again"))
    for step in (4, 6):
        shutil.rmtree(f"again/checkpoints/step-{step:06d}")
    assert _train("again", resume=True).exit_code == 0
    assert answers == [200], "the answers are in the run folder"
    hashes = [[event["batch_sha256"] for event in _events(run, "step")] for run in ("whole", "again")]
    assert hashes[0] == hashes[1] and len(hashes[0]) == 6
    looks = [
        [(event["step"], event["loss"], event["right"], event["is_best"]) for event in _events(run, "held_out")]
        for run in ("whole", "again")
    ]
    assert looks[0] == looks[1] and len(looks[0]) == 4
    for name, tensor in _weights("whole", 6).items():
        assert torch.equal(tensor, _weights("again", 6)[name])


def test_the_base_model_answers_once_per_machine(answers: list[int]) -> None:
    """A second run reads the answers of the first; other prompts or another base would be answered again."""
    _train("first")
    _train("second")
    assert len(answers) <= 1
    assert Path("first/replay.json").read_bytes() == Path("second/replay.json").read_bytes()
    documents = json.loads(Path("first/replay.json").read_text())
    end = load_tokenizer("base").backend.token_to_id("<|im_end|>")
    assert len(documents) == 200 and documents[0][1][-1] == end != documents[1][1][-1]


def test_replayed_documents_are_trained_on(answers: list[int]) -> None:
    """An epoch has more supervised tokens and steps than without."""
    counts = {}
    for share in (0.0, 0.2):
        result = _train(f"share-{share}", train={"replay": share, "max_steps": None, "epochs": 1})
        counts[share] = (result.steps, result.supervised_tokens)
    assert counts[0.2][0] > counts[0.0][0] and counts[0.2][1] > counts[0.0][1]


@pytest.mark.parametrize("setting", ["auto", 0.0])
def test_without_replay_nobody_is_asked(answers: list[int], setting: float | str) -> None:
    _train(f"none-{setting}", train={"replay": setting})
    assert not answers and not Path(f"none-{setting}/replay.json").exists()


def test_a_model_without_sound_answers_is_refused_before_the_first_step() -> None:
    """A random model repeats a token; replaying that would teach it."""
    shutil.copytree("base", "other")
    config = {**_CONFIG, "model": "other", "corpus": "corpus-unsound", "seed": 1}
    model = AutoModelForCausalLM.from_pretrained("other")
    model.lm_head.weight.data.zero_()
    model.save_pretrained("other")
    with pytest.raises(UserError, match="no sound answer"):
        tunewell.train(config, out="unsound", progress=False)


def test_held_out_rows_decide_nothing_in_training(monkeypatch: pytest.MonkeyPatch, answers: list[int]) -> None:
    """A planted fault: the held-out rows are garbage. Steps, evaluations and the best checkpoint stay the same."""
    clean = _train("clean")
    original = reader.Split.arrays

    def spoiled(split: reader.Split, index: int) -> Any:
        ids, labels = original(split, index)
        return (
            (np.full_like(ids, 7), np.where(labels == -100, -100, 7))
            if split.folder.name == "held_out"
            else (ids, labels)
        )

    monkeypatch.setattr(reader.Split, "arrays", spoiled)
    dirty = _train("dirty")
    assert dirty.best_step == clean.best_step and dirty.losses == clean.losses and dirty.held_out == clean.held_out
    for name, tensor in _weights("clean", 6).items():
        assert torch.equal(tensor, _weights("dirty", 6)[name])


def test_a_run_without_a_slice_uses_its_last_checkpoint_and_says_why(answers: list[int]) -> None:
    """Its held-out rows are still watched: their loss is in the log and in the curve."""
    result = _train("bare", data={"selection": 0}, evaluate={"patience": 1})
    assert result.steps == 6 and result.best_step is None
    assert [event["is_best"] for event in _events("bare", "held_out")] == [False] * 4
    assert any("`evaluate.patience` has no effect" in note for note in result.notes)
    found = resolve_model("bare")
    assert found.step == 6 and "no rows were set aside" in found.because


def test_a_resumed_run_of_an_older_version_keeps_its_rows(answers: list[int]) -> None:
    """Its plan knows neither slice nor replay; taking rows out of its corpus now would change its data."""
    _train("old", data={"selection": 0}, train={"replay": 0})
    record = json.loads(Path("old/plan.json").read_text())
    del record["config"]["data"]["selection"], record["config"]["train"]["replay"], record["replay"]
    Path("old/plan.json").write_text(json.dumps(record))
    shutil.rmtree("old/checkpoints/step-000006")
    assert _train("old", resume=True).steps == 6
    assert not answers


def test_a_resumed_run_keeps_the_replay_that_auto_was_when_it_began(
    answers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer version may choose another share: the run would draw other documents, or be refused."""
    _train("auto", train={"replay": "auto"})
    shutil.rmtree("auto/checkpoints/step-000006")
    monkeypatch.setattr(compute, "recommend_replay", lambda *_: Chosen(0.2, because="newer"))
    resumed = _train("auto", resume=True, train={"replay": "auto"})
    assert resumed.steps == 6 and not resumed.changes
    assert not answers and not Path("auto/replay.json").exists()


def test_a_run_that_came_without_its_rows_says_whose_config_names_them(answers: list[int]) -> None:
    """On another machine, only the run folder was copied: the error named a file of which nobody there had heard."""
    rows = {"sources": shutil.copy("rows.jsonl", "own.jsonl")}
    _train("alone", data=rows)
    Path("own.jsonl").unlink()
    shutil.rmtree("corpus-alone")
    with pytest.raises(UserError, match=r"own.jsonl") as error:
        _train("alone", resume=True, data=rows)
    assert "config of the run" in str(error.value.where) and "`corpus-alone`" in str(error.value.fix)


def test_lost_answers_are_not_asked_of_a_trained_model(answers: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """On resume, the model is no longer the base model."""
    _train("lost")
    shutil.rmtree("lost/checkpoints/step-000006")
    Path("lost/replay.json").unlink()
    monkeypatch.setattr(replay_module, "_CACHE", replay_module.DiskCache("empty"))
    with pytest.raises(UserError, match="replayed documents of the run are lost"):
        _train("lost", resume=True)
