"""`sweep` end to end on a tiny model: the same losses as separate runs, resume, seeds, refused input."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from sick_models import SETTINGS, WORDINGS, colour_rows, write_base, write_jsonl, write_tokenizer

import tunewell
from tunewell.config.load import load_config
from tunewell.core.errors import UserError
from tunewell.core.progress import silent
from tunewell.features.sweep import runner
from tunewell.features.sweep.sweep import SweepResult
from tunewell.features.sweep.workflow import SweepOptions, sweep
from tunewell.models import load as models
from tunewell.runs.config import RunOptions
from tunewell.training.events import StepTaken
from tunewell.workflows.train import run_training

FIXED = {
    **SETTINGS,
    "train.max_steps": 4,
    "train.threads": 1,
    "evaluate.every_steps": 2,
    "verdict.questions": 2,
    "evaluate.samples": 0,
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("swept")
    write_base(folder / "base", write_tokenizer(folder / "tokenizer"))
    write_jsonl(folder / "rows.jsonl", colour_rows(WORDINGS[:4]))
    write_jsonl(folder / "held.jsonl", colour_rows(WORDINGS[9:]))
    return folder


def fixed_sets(project: Path, **more: Any) -> list[str]:
    values = {**FIXED, "data.held_out": str(project / "held.jsonl"), "corpus": str(project / "corpus"), **more}
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


@contextmanager
def quietly(title: str) -> Iterator[Any]:
    yield silent


def swept(project: Path, out: Path, *alternatives: str, verdict: bool = False, **options: Any) -> SweepResult:
    sets = [*fixed_sets(project), f"verdict.after_training={json.dumps(verdict)}", *alternatives]
    return sweep(
        sets=sets,
        model=str(project / "base"),
        data=[str(project / "rows.jsonl")],
        options=SweepOptions(out=out, **options),
        shown=quietly,
    )


def losses_of(run: Path) -> list[Any]:
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [(event["kind"], event["step"], event["loss"]) for event in lines]


@pytest.mark.slow
def test_the_losses_are_those_of_separate_runs_to_the_bit(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is loaded once: what one run trains must not leak into the next, here embeddings trained in full."""
    loads: list[str] = []
    load_files = models._load_model
    monkeypatch.setattr(models, "_load_model", lambda options: [loads.append(options.model), load_files(options)][1])
    modules = "[embed_tokens],[]"
    found = swept(project, tmp_path / "sweep", "train.learning_rate=1e-2,3e-2", f"method.modules_to_save={modules}")
    assert [run.status for run in found.runs] == ["finished"] * 4
    assert len(loads) == 1, "the base model was loaded more than once"
    monkeypatch.undo()
    for run in found.runs:
        name = tmp_path / "separate" / run.name
        sets = [*fixed_sets(project, run=str(name)), "verdict.after_training=false"]
        sets += [f"{key}={value}" for key, value in run.settings.items()]
        loaded = load_config(sets=sets, model=str(project / "base"), data=[str(project / "rows.jsonl")], has_file=False)
        run_training(loaded, RunOptions())
        assert losses_of(name) == losses_of(Path(run.run)), run.name
    assert found.best is not None and found.best.held_out == min(run.held_out or 9 for run in found.runs)
    assert (tmp_path / "sweep" / "curves.svg").read_text().count('class="line"') == 8


def test_a_sweep_goes_on_where_it_was_interrupted(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finished runs are not repeated, and the interrupted one is resumed from its checkpoint."""
    trained: list[str] = []

    def interrupt_after_two_steps(event: Any) -> None:
        if isinstance(event, StepTaken) and event.step == 2:
            signal.raise_signal(signal.SIGINT)

    def train(loaded: Any, options: RunOptions, listener: Any) -> Any:
        if len(trained) == 1 and not resumed:
            run_training(loaded, RunOptions(owns_process=True), interrupt_after_two_steps)
            raise KeyboardInterrupt
        trained.append(Path(loaded.config.run).name)
        return run_training(loaded, options, listener)

    resumed = False
    monkeypatch.setattr(runner, "run_training", train)
    alternatives = "train.learning_rate=1e-3,1e-2,3e-2"
    with pytest.raises(KeyboardInterrupt):
        swept(project, tmp_path / "sweep", alternatives)
    with pytest.raises(UserError, match="already contains a sweep"):
        swept(project, tmp_path / "sweep", alternatives)
    resumed = True
    found = swept(project, tmp_path / "sweep", is_resuming=True)  # without the alternatives
    assert len(trained) == 3 == len(set(trained)), trained
    assert [run.status for run in found.runs] == ["finished"] * 3
    assert json.loads((tmp_path / "sweep" / "sweep.json").read_text())["result"]["best"] == found.best.name  # pyright: ignore


@pytest.mark.slow
def test_every_run_has_a_verdict_and_the_base_is_measured_once(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was killed between its last step and its verdict gets one when the sweep is resumed."""
    monkeypatch.setenv("TUNEWELL_CACHE", str(tmp_path / "cache"))
    found = swept(project, tmp_path / "sweep", "train.learning_rate=1e-3,1e-2", verdict=True)
    reports = [Path(run.run) / "report.json" for run in found.runs]
    measured = [json.loads(report.read_text())["base_measured_at"] for report in reports]
    assert measured.count(None) == 1
    reports[0].unlink()
    again = swept(project, tmp_path / "sweep", verdict=True, is_resuming=True)
    assert reports[0].is_file() and all(run.verdict for run in again.runs)


@pytest.mark.slow
def test_seeds_tell_noise_from_a_margin(project: Path, tmp_path: Path) -> None:
    """Repetitions have the same held-out rows; the interval is over seeds."""
    found = swept(project, tmp_path / "sweep", "train.learning_rate=1e-6,1e-2", seeds=2)
    assert len(found.runs) == 4 and found.interval is not None
    first = {tuple(losses_of(Path(run.run))[0]) for run in found.runs}
    assert len(first) == 1, "the untrained model has the same held-out loss with every seed"
    last = {tuple(losses_of(Path(run.run))[-1]) for run in found.runs if run.settings["train.learning_rate"] == "1e-2"}
    assert len(last) == 2, "another seed gives another loss"


@pytest.mark.slow
def test_data_settings_have_their_own_corpus(project: Path, tmp_path: Path) -> None:
    """One corpus per distinct data setting, and a note that held-out rows may differ."""
    found = swept(project, tmp_path / "sweep", "packing.context_length=64,128", "train.learning_rate=1e-3,1e-2")
    assert len(list((tmp_path / "sweep" / "corpora").glob("*/manifest.json"))) == 2
    assert any("corpora" in note for note in found.notes)
    assert [run.status for run in found.runs] == ["finished"] * 4


def test_bad_alternatives_are_refused_before_the_first_run(project: Path, tmp_path: Path) -> None:
    """The last of many alternatives must not be found invalid after a night of training."""
    out = tmp_path / "sweep"
    for alternatives in ("train.learning_rate=1e-3,fast", "train.lerning_rate=1,2", "verdict.metrics=[a.py:b],[]"):
        with pytest.raises(UserError) as error:
            swept(project, out, alternatives)
        where = error.value.where or ""
        assert "with " in where or alternatives.partition("=")[0] in where or "lerning" in str(error.value)
    with pytest.raises(UserError):
        swept(project, out, "data.sources=[rows.jsonl],[missing.jsonl]")
    assert not list(tmp_path.glob("sweep/*/plan.json"))
    swept(project, out, "train.learning_rate=1e-3,1e-2")  # the corrected command can use the folder
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(UserError, match="not empty"):
        swept(project, tmp_path / "other", "train.learning_rate=1e-3,1e-2")


def test_a_failed_run_does_not_cost_the_others(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in one run is reported with it; if all fail, the error is raised."""

    def train(loaded: Any, options: RunOptions, listener: Any) -> Any:
        if loaded.config.train.learning_rate in failing:
            raise RuntimeError("out of luck")
        return run_training(loaded, options, listener)

    failing = {1e-3}
    monkeypatch.setattr(runner, "run_training", train)
    found = swept(project, tmp_path / "one", "train.learning_rate=1e-3,1e-2")
    assert [run.status for run in found.runs] == ["finished", "failed"]
    assert "out of luck" in (found.runs[1].note or "") and found.exit_code == 0
    failing = {1e-3, 1e-2}
    with pytest.raises(RuntimeError, match="out of luck"):
        swept(project, tmp_path / "all", "train.learning_rate=1e-3,1e-2")


def test_the_library_takes_values_of_any_type(project: Path, tmp_path: Path) -> None:
    """Numbers, lists and texts become the same settings as on the command line."""
    sets = [*fixed_sets(project), "verdict.after_training=false"]
    found = tunewell.sweep(
        {"method": {"targets": ["q_proj"]}},
        over={"method.targets": [["q_proj"], ["q_proj", "v_proj"]], "train.learning_rate": [1e-2]},
        model=project / "base",
        data=project / "rows.jsonl",
        out=tmp_path / "sweep",
        sets=sets,
        progress=False,
    )
    assert {run.settings["method.targets"] for run in found.runs} == {'["q_proj"]', '["q_proj", "v_proj"]'}
    assert "best" in repr(found) and "conclusion" in found._repr_html_()
    config = json.loads((Path(found.runs[0].run) / "plan.json").read_text())["config"]
    assert config["train"]["learning_rate"] == 1e-2


@pytest.mark.slow
def test_a_sweep_survives_a_kill(project: Path, tmp_path: Path) -> None:
    """kill -9 in the middle, then `--resume`: every run ends with the losses of an undisturbed sweep."""
    words = ["sweep", "--model", str(project / "base"), "--data", str(project / "rows.jsonl"), "--no-validate"]
    words += ["--set", "train.learning_rate=1e-2,3e-2,1e-1", "--set", "method.rank=2,4"]
    for text in fixed_sets(project, **{"train.max_steps": 40, "checkpoints.every_steps": 10}):
        words += ["--set", text]
    command = [sys.executable, "-m", "tunewell", *words]
    environment = {**os.environ, "CI": "1"}
    done = subprocess.run([*command, "--out", "whole"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    process = subprocess.Popen([*command, "--out", "killed"], cwd=tmp_path, env=environment)
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("killed/*/checkpoints/step-*"))) < 5 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(list(tmp_path.glob("killed/*/outcome.json"))) < 6, "it was killed too late"
    again = subprocess.run(
        [sys.executable, "-m", "tunewell", "sweep", "--resume", "--out", "killed"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert again.returncode == 0, again.stderr
    for run in (tmp_path / "whole").glob("*/events.jsonl"):
        assert losses_of(run.parent) == losses_of(tmp_path / "killed" / run.parent.name)
