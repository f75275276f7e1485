"""The same rows and the same model give one set of values and one loss curve, whatever the way in."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from sick_models import WORDINGS, colour_rows, write_base, write_jsonl, write_tokenizer

import tunewell
from tunewell.cli.main import main
from tunewell.config.load import as_sets, load_config
from tunewell.core.progress import silent
from tunewell.features.sweep.workflow import SweepOptions, sweep
from tunewell.planning.recommendation import RECOMMENDED
from tunewell.records.plan import Chosen, read_plan
from tunewell.runs.config import RunOptions, load_for_run
from tunewell.workflows.init import init_to_train
from tunewell.workflows.train import run_training

PLANNED = ("learning_rate", "schedule", "warmup_steps", "num_steps", "epochs", "batch_tokens", "batch_documents")
ELSEWHERE = {"train.threads": 1, "evaluate.samples": 0, "verdict.after_training": False, "device": "cpu"}
"""Settings that are not recommended, and keep the runs short."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    torch.set_num_threads(1)
    write_base(tmp_path / "base", write_tokenizer(tmp_path / "tokenizer"))
    write_jsonl(tmp_path / "rows.jsonl", colour_rows(WORDINGS[:4]))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sets() -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in ELSEWHERE.items()]


def run_of(name: str, config: Any = None, given: Sequence[str] = (), **flags: Any) -> Path:
    loaded = load_for_run(config, [*given, *as_sets(run=name)], is_resuming=False, **flags)
    return Path(run_training(loaded, RunOptions(is_alone=False)).run)


def facts(run: Path) -> tuple[dict[str, Any], list[float]]:
    """Return the planned values and the losses of a run."""
    plan = read_plan(run)
    planned = {name: getattr(plan, name).value for name in PLANNED}
    adapter = {name: plan.config["method"][name] for name in ("rank", "alpha")}
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return planned | adapter, [line["loss"] for line in lines if "loss" in line and "grad_norm" in line]


@contextmanager
def quietly(title: str) -> Iterator[Any]:
    yield silent


def test_every_way_in_gives_the_same_values_and_the_same_curve(folder: Path, capsys: pytest.CaptureFixture[str]):
    """`train --data` and the library used 2e-4 and 3 epochs where `init` wrote 1e-3 and 5: WEAK instead of PASS."""
    bare = {"model": "base", "data": ["rows.jsonl"]}
    runs = {"train --data": run_of("by-data", given=sets(), **bare)}
    library = tunewell.train(model="base", data="rows.jsonl", settings=ELSEWHERE, out="by-library", progress=False)
    runs["library"] = Path(library.run)
    options = SweepOptions(out=Path("swept"))
    given = [*sets(), "evaluate.max_documents=1,2"]
    swept = sweep(None, sets=given, model="base", data=["rows.jsonl"], options=options, shown=quietly)
    runs["sweep"] = Path(swept.runs[0].run)
    assert main(["plan", "--model", "base", "--data", "rows.jsonl", "--no-measure", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["plan"]
    init_to_train("rows.jsonl", model="base", sets=sets())  # also `train ROWS`
    assert load_config().config.train.epochs != "auto"
    runs["init"] = run_of("by-init")
    found = {name: facts(run) for name, run in runs.items()}
    values, losses = found["init"]
    assert len(losses) == values["num_steps"] > 10
    for name, own in found.items():
        assert own == (values, losses), name
    assert {name: planned[name]["value"] for name in PLANNED} == {name: values[name] for name in PLANNED}


def test_the_run_records_the_chosen_values_with_their_reasons(folder: Path):
    """Guards a resume with another version, whose recommendation may differ."""
    run = run_of("run", given=sets(), model="base", data=["rows.jsonl"])
    plan, written = read_plan(run), load_config(run / "config.yaml").config
    saved = {
        f"{section}.{name}": value for section in ("method", "train") for name, value in plan.config[section].items()
    }
    chosen = [key for key in RECOMMENDED if saved[key] != "auto"]
    assert len(chosen) == len(RECOMMENDED) - 1  # one of the two sizes of an update
    for key in chosen:
        section, _, name = key.partition(".")
        assert getattr(getattr(written, section), name) == saved[key]
    reasons = [own.because for _, own in plan if isinstance(own, Chosen)]
    assert "the default" not in [plan.learning_rate.because, plan.epochs.because, plan.batch_documents.because]
    assert all(reasons) and plan.updates.startswith(f"{plan.num_steps.value} updates of up to")
