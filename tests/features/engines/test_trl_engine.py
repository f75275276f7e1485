"""Train with the installed TRL, or with that of the environment in TUNEWELL_ENGINE_PYTHON (`make test-old`)."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from projects import SETTINGS, rare_ids, write_project
from safetensors.torch import load_file, save_file

import tunewell
from tunewell.cli.main import main
from tunewell.core.child import start_in_group
from tunewell.records.events import read_events
from tunewell.records.healing import read_healing

pytestmark = pytest.mark.slow

PYTHON = os.environ.get("TUNEWELL_ENGINE_PYTHON", sys.executable)
BY_HAND = """
import json, sys
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

model, tokenizer, rows, plan = sys.argv[1:]
plan = json.loads(plan)
args = SFTConfig(
    output_dir="by-hand", max_steps=plan["num_steps"], per_device_train_batch_size=4, learning_rate=5e-3,
    lr_scheduler_type="cosine", warmup_steps=plan["warmup_steps"], weight_decay=0.0, max_grad_norm=1.0, seed=0,
    bf16=False, use_cpu=True, gradient_checkpointing=False, logging_steps=1, report_to="none", save_strategy="no",
    max_length=None, optim="adamw_torch", disable_tqdm=True,
)
torch.manual_seed(0)
loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
trainer = SFTTrainer(
    model=loaded, args=args, train_dataset=Dataset.from_list([json.loads(line) for line in open(rows)]),
    processing_class=AutoTokenizer.from_pretrained(tokenizer),
    peft_config=LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"),
)
trainer.train()
json.dump([entry["loss"] for entry in trainer.state.log_history if "loss" in entry], open("losses.json", "w"))
"""


def settings(**more: Any) -> dict[str, Any]:
    python = {} if sys.executable == PYTHON else {"engine_python": PYTHON}
    return {**SETTINGS, **python, "method.alpha": 8, "train.max_steps": 12, **more}


def train(folder: Path, out: str, *, resume: bool = False, **more: Any) -> tunewell.TrainResult:
    model, data, out = str(folder / "model"), str(folder / "rows.jsonl"), str(folder / out)
    given = settings(**{"corpus": str(folder / "corpus"), **more})
    return tunewell.train(model=model, data=data, out=out, settings=given, resume=resume, progress=False)


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    return write_project(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def whole(project) -> tunewell.TrainResult:
    """A run without a stop, with its verdict."""
    return train(project, "run", **{"verdict.after_training": True, "checkpoints.every_steps": 4})


def test_a_run_ends_with_a_verdict_and_proven_exports(whole, project, capsys):
    """Guards against weights that our own code cannot read, or reads as another model."""
    assert whole.status == "finished" and whole.steps == 12
    assert whole.losses[-1][1] < whole.losses[0][1]
    assert whole.validation is not None and whole.validation.report.verdict
    exported = tunewell.export(whole, to="adapter,merged", progress=False)
    assert exported.exit_code == 0
    assert main(["chat", str(whole.run), "--prompt", "What is 1?"]) == 0


def test_the_first_losses_are_those_of_trl_by_hand(whole, project, tmp_path):
    """Guards against rows, masks, order, seeds or settings that differ from those of the trainer alone."""
    corpus, plan = tunewell.open_corpus(project / "corpus"), json.loads((whole.run / "plan.json").read_text())
    with (tmp_path / "rows.jsonl").open("w") as file:
        for index in range(len(corpus)):
            ids, labels = corpus.arrays(index)
            file.write(json.dumps({"input_ids": ids.tolist(), "labels": labels.tolist()}) + "\n")
    values = json.dumps({name: plan[name]["value"] for name in ("num_steps", "warmup_steps")})
    files = [project / "model", project / "corpus" / "tokenizer", tmp_path / "rows.jsonl"]
    subprocess.run([PYTHON, "-c", BY_HAND, *map(str, files), values], cwd=tmp_path, check=True, capture_output=True)
    by_hand = json.loads((tmp_path / "losses.json").read_text())
    assert [loss for _, loss in whole.losses] == pytest.approx(by_hand, abs=2e-4)  # some versions log four digits


@pytest.mark.parametrize("kind", ["full", "dora"])
def test_other_methods_train_and_their_weights_are_read_as_they_are(project, kind):
    """Guards against weights of a method that our own code reads as those of another model."""
    steps = {"train.max_steps": 6, "train.learning_rate": 2e-3, "checkpoints.every_steps": 6}
    rows = {"data.selection": 0, "corpus": str(project / "corpus-held-out"), "verdict.after_training": True}
    result = train(project, kind, **{"method.kind": kind, **steps, **rows})
    assert (result.status, result.steps) == ("finished", 6) and result.losses[-1][1] < result.losses[0][1]
    assert result.validation is not None
    held_out = result.validation.report.held_out
    assert held_out is not None and held_out.base is not None
    assert held_out.tuned == pytest.approx(dict(result.held_out)[6], abs=1e-3), "TRL's loss of the same rows"
    assert held_out.base == pytest.approx(dict(result.held_out)[0], abs=1e-3) != held_out.tuned
    weights = load_file(next((result.run / "checkpoints" / "step-000006").glob("*.safetensors")))
    assert any("magnitude" in name for name in weights) == (kind == "dora")
    assert tunewell.export(result, to="merged", progress=False).exit_code == 0


def test_a_nan_stops_the_run_before_its_update(project, tmp_path):
    """Guards against weights that a NaN has destroyed: the first update with the row at fault must not happen."""
    write_project(tmp_path)
    path = tmp_path / "model" / "model.safetensors"
    weights = load_file(path)
    weights["model.embed_tokens.weight"][rare_ids(tmp_path / "model")] = float("nan")
    save_file(weights, path, {"format": "pt"})
    result = train(tmp_path, "run", **{"train.max_steps": 40, "data.held_out": 0.0, "data.selection": 0})
    (entry,) = [entry for entry in read_healing(tmp_path / "run") if entry.severity == "fault"]
    assert (result.status, result.exit_code, entry.action) == ("stopped", 4, "stop")
    assert entry.name == "nan-gradients" and "embed_tokens" in (entry.place or "")
    steps = [event for event in read_events(tmp_path / "run" / "events.jsonl") if event["kind"] == "step"]
    assert steps[-1]["was_skipped"] and not any(step["was_skipped"] for step in steps[:-1])


def test_a_killed_trainer_is_resumed_from_its_own_checkpoint(whole, project):
    """Guards against steps that are lost or repeated after a kill, and against optimizer states that start anew."""
    run = project / "killed"
    sets = [f"--set={key}={json.dumps(value)}" for key, value in settings(corpus=str(project / "corpus")).items()]
    sets.append("--set=checkpoints.every_steps=4")
    files = [f"--model={project / 'model'}", f"--data={project / 'rows.jsonl'}", f"--out={run}"]
    process = start_in_group([sys.executable, "-m", "tunewell", "train", *files, *sets], inherited=())
    worker = str(run / "engine" / "code" / "worker.py").encode()
    deadline = time.monotonic() + 240
    while not (run / "checkpoints" / "step-000004").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    pids = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if worker in _read(path)]
    assert len(pids) == 1
    os.kill(pids[0], 9)
    assert process.wait(120) == 4
    resumed = train(project, "killed", resume=True, **{"checkpoints.every_steps": 4})
    assert resumed.status == "finished"
    assert [step for step, _ in resumed.losses] == list(range(1, 13))
    assert dict(resumed.losses) == pytest.approx(dict(whole.losses), abs=1e-5)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
