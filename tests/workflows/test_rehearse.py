"""`tunewell train --rehearse`: it passes where a model learns, and fails with the cause where it does not."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tunewell
from corpora import tree, write_sums
from forked import run_command
from tunewell.core.errors import UserError
from tunewell.data.corpus.reader import open_corpus
from tunewell.inference.runtime import DocumentLosses
from tunewell.records.report import EXIT_CODES
from tunewell.runs.config import RunOptions, load_for_run
from tunewell.runs.rehearsal import Rehearsal
from tunewell.workflows import rehearse as workflow

_FAST = ["device=cpu", "train.threads=1", "train.learning_rate=5e-3", "data.held_out=0.2"]


@pytest.fixture
def project(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with rows and a config for a model that starts from nothing."""
    write_sums(tmp_path, tiny_model, model="preset:tiny-1m", num_rows=60)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _rehearse(*sets: str) -> Any:
    return tunewell.rehearse(sets=[*_FAST, *sets], progress=False)


def test_a_setup_that_learns_passes_and_leaves_only_the_corpus(project: Path) -> None:
    done = run_command("train", "--rehearse", *(part for text in _FAST for part in ("--set", text)), cwd=project)
    assert done.returncode == 0, done.stderr
    words = " ".join(done.stdout.split())
    assert words.startswith("PASS the loss falls and answers change") and "next: `tunewell train`" in words
    for label in (
        "loss ",
        "question What is ",
        "before ",
        "after ",
        "expected It is ",
        "memory ",
        "per step of the run",
    ):
        assert label in words
    assert sorted(path.name for path in project.iterdir()) == [".tunewell", "corpus", "rows.jsonl", "tunewell.yaml"]


def test_the_numbers_belong_to_the_rows_and_to_the_whole_run(project: Path) -> None:
    result = _rehearse("train.epochs=7")
    assert result.problems == [] and result.exit_code == 0
    assert result.loss_after < 0.9 * result.loss_before and (result.falls > 0).all()
    assert 20 <= result.num_rows <= result.num_documents == len(open_corpus("corpus")) and len(result.steps) <= 24
    assert result.plan.epochs.value == pytest.approx(7, abs=0.01)
    told = result.as_json()
    assert told["run"]["steps"] * told["run"]["seconds_per_step"] == pytest.approx(told["run"]["seconds"])
    assert told["run"]["seconds"] == pytest.approx(
        result.plan.epochs.value * result.corpus_tokens / result.tokens_per_second
    )
    assert "passed=True" in repr(result) and "PASS" in result._repr_html_()


def test_a_rate_that_moves_nothing_fails(project: Path) -> None:
    """The planted fault: a run of hours in which nothing is learned."""
    done = run_command("train", "--rehearse", "--json", "--set", "train.learning_rate=1e-30", cwd=project)
    assert done.returncode == EXIT_CODES["FAIL"]
    told = json.loads(done.stdout)
    assert not told["passed"] and told["loss"]["before"] == pytest.approx(told["loss"]["after"], abs=1e-5)
    assert [problem["what"].partition(":")[0] for problem in told["problems"]] == [
        "the loss does not fall",
        "none of 2 answers changed",
    ]
    assert "`train.learning_rate: 1e-30` may be too low" in told["problems"][0]["next"]


def test_a_rate_that_destroys_the_model_fails(project: Path) -> None:
    result = _rehearse("train.learning_rate=1.0", "healing.on=false", "train.max_grad_norm=null")
    assert result.exit_code == EXIT_CODES["FAIL"]
    assert "the loss rises" in result.problems[0][0] and "too high; try 0.1" in result.problems[0][1]


def test_a_fall_that_chance_explains_does_not_pass(project: Path) -> None:
    """On average the rows got better by 5%, but as many got worse."""
    result = _rehearse()
    tokens = np.full(20, 10)
    before = DocumentLosses(np.arange(20), np.full(20, 20.0), tokens)
    noise = np.tile([8.0, -6.0], 10)
    doubtful = Rehearsal(
        **{**vars(result), "before": before, "after": DocumentLosses(np.arange(20), 20.0 - noise, tokens)}
    )
    assert doubtful.loss_after == pytest.approx(0.95 * doubtful.loss_before)
    assert "the loss does not fall" in doubtful.problems[0][0]
    empty = DocumentLosses(np.arange(20), np.zeros(20), np.zeros(20, int))
    nothing = Rehearsal(**{**vars(result), "before": empty, "after": empty})
    assert "nothing is supervised" in nothing.problems[0][0] and nothing.exit_code


def test_a_slow_machine_gets_few_short_rows_and_few_steps(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workflow, "_SECONDS", 0.0)
    result = _rehearse()
    assert result.num_rows == 20 and len(result.steps) == 6
    assert any("short rows" in note for note in result.notes)


@pytest.mark.slow
def test_a_run_that_was_interrupted_is_not_disturbed(project: Path) -> None:
    arguments = ["train", "--no-validate", *(part for text in _FAST for part in ("--set", text))]
    assert run_command(*arguments, "--set", "train.max_steps=4", cwd=project).returncode == 0
    before = tree(project / "run")
    assert run_command(*arguments, "--rehearse", cwd=project).returncode == 0
    assert tree(project / "run") == before
    assert run_command(*arguments, "--resume", "--set", "train.max_steps=4", cwd=project).returncode == 0
    with pytest.raises(UserError, match="does not resume"):
        workflow.rehearse(load_for_run(None, is_resuming=True), RunOptions(is_resuming=True))
