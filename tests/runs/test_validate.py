"""`validate` end to end on tiny models: the sick are found out, each by its own reason; the healthy are left alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from sick_models import (
    END,
    WORDINGS,
    asked,
    chance_rows,
    colour_rows,
    everyday_rows,
    new_model,
    run_of,
    save_model,
    teach,
    write_base,
    write_jsonl,
    write_tokenizer,
)
from transformers import AutoModelForCausalLM

from tunewell.records.report import Report, read_report
from tunewell.workflows.train_result import TrainResult
from tunewell.workflows.validate import Validation, validate

TRAINED, HELD_OUT = colour_rows(WORDINGS[:9]), colour_rows(WORDINGS[9:])
QUESTIONS = [asked(row["question"]) for row in TRAINED]
FAST = {"train.max_steps": 30, "evaluate.every_steps": 15}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Path:
    return write_base(tmp_path_factory.mktemp("base") / "base", tokenizer)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Doors to learn, the same doors asked about in other words, and everyday text so that nothing is forgotten."""
    folder = tmp_path_factory.mktemp("project")
    write_jsonl(folder / "rows.jsonl", TRAINED)
    write_jsonl(folder / "held.jsonl", HELD_OUT)
    write_jsonl(folder / "everyday.jsonl", everyday_rows()[:10])
    return folder


@pytest.fixture(scope="module")
def lora(project: Path, base: Path) -> TrainResult:
    """An adapter, judged at the end of its training."""
    wishes = {"train.learning_rate": 5e-3, "verdict.after_training": True}
    return run_of(project, base, out="lora", sets=FAST | wishes)


@pytest.fixture(scope="module")
def full(project: Path, base: Path) -> TrainResult:
    wishes = {"train.learning_rate": 3e-3, "method.kind": "full", "seed": 1}
    return run_of(project, base, out="full", sets=FAST | wishes)


@pytest.fixture(scope="module")
def from_nothing(project: Path, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    empty = save_model(new_model(tokenizer, seed=3), tmp_path_factory.mktemp("empty") / "empty", tokenizer)
    wishes = {"train.learning_rate": 5e-3, "method.kind": "full", "seed": 2, "train.max_steps": 60}
    return run_of(project, empty, out="nothing", sets=FAST | wishes)


def copy_of(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base)


def judged(place: Path, **more: Any) -> Validation:
    return validate(place, device="cpu", **more)


def ends_at_once(folder: Path, base: Path, project: Path) -> Report:
    model = copy_of(base)
    teach(model, base, [(question, END) for question in QUESTIONS], steps=15)
    sick = save_model(model, folder / "mute", base)
    return judged(sick, base=str(base), data=project / "held.jsonl", out=folder / "report").report


def goes_round(folder: Path, base: Path, project: Path) -> Report:
    model = copy_of(base)
    teach(model, base, [(question, "It is red. " * 15) for question in QUESTIONS], steps=20)
    sick = save_model(model, folder / "round", base)
    return judged(sick, base=str(base), data=project / "held.jsonl", out=folder / "report").report


def never_applied(folder: Path, base: Path, project: Path) -> Report:
    """PEFT begins with matrices that change nothing."""
    get_peft_model(copy_of(base), LoraConfig(r=4, target_modules="all-linear")).save_pretrained(folder / "adapter")
    saved = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert all(not tensor.any() for name, tensor in saved.items() if "lora_B" in name)
    return judged(folder / "adapter", data=project / "held.jsonl", out=folder / "report").report


def with_nan(folder: Path, base: Path, project: Path) -> Report:
    sick = save_model(copy_of(base), folder / "nan", base)
    tensors = load_file(sick / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(tensors, sick / "model.safetensors", metadata={"format": "pt"})
    return judged(sick, base=str(base), data=project / "held.jsonl", out=folder / "report").report


def by_heart(folder: Path, base: Path, project: Path) -> Report:
    """A run of ours on rows that have nothing in common."""
    write_jsonl(folder / "rows.jsonl", chance_rows(24))
    write_jsonl(folder / "held.jsonl", chance_rows(12, seed=5))
    wishes = {"train.max_steps": 60, "evaluate.every_steps": 5, "train.learning_rate": 1e-2, "method.kind": "full"}
    result = run_of(folder, base, sets=wishes)
    assert result.last_loss is not None and result.last_loss < 0.1
    return judged(result.run).report


def forgetful(folder: Path, base: Path, project: Path) -> Report:
    """A run of ours that learns its rows well, at a rate that leaves nothing else."""
    write_jsonl(folder / "rows.jsonl", TRAINED)
    write_jsonl(folder / "held.jsonl", HELD_OUT)
    return judged(run_of(folder, base, sets=FAST | {"train.learning_rate": 1e-2, "method.kind": "full"}).run).report


SICK = {
    "answers_nothing": ends_at_once,
    "loops": goes_round,
    "nothing_changed": never_applied,
    "weights_not_finite": with_nan,
    "over_fitted": by_heart,
    "forgets": forgetful,
}


@pytest.mark.parametrize("code", SICK)
def test_a_sick_model_is_found_out_by_its_own_reason(code: str, tmp_path: Path, base: Path, project: Path) -> None:
    report = SICK[code](tmp_path, base, project)
    assert report.reasons[0].code == code, [(reason.code, reason.what) for reason in report.reasons]
    assert report.verdict == report.reasons[0].level
    assert report.reasons[0].next and any(letter.isdigit() for letter in report.reasons[0].what)


def test_healthy_runs_pass(lora: TrainResult, full: TrainResult, from_nothing: TrainResult) -> None:
    for result in (lora, full, from_nothing):
        report = judged(result.run).report
        assert report.verdict == "PASS", [(reason.code, reason.what) for reason in report.reasons]
        assert report.tuned_tally is not None and report.tuned_tally.right > 0.9 * report.tuned_tally.judged == 16.2
        assert report.next.startswith("`tunewell chat")
