"""`sweep --budget`: settings near the recommended ones, judged on a slice of the training rows."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from sick_models import WORDINGS, colour_rows, write_base, write_jsonl, write_tokenizer

from tunewell.config.load import load_config
from tunewell.core.errors import UserError
from tunewell.core.progress import silent
from tunewell.data.corpus.reader import open_corpus
from tunewell.features.sweep import budget as module
from tunewell.features.sweep.budget import candidates, conclude_budget, parse_budget, selection_sets
from tunewell.features.sweep.sweep import SweepSpec, Trial, TrialResult, conclude
from tunewell.features.sweep.workflow import SweepOptions, sweep
from tunewell.planning.recommendation import with_recommended
from tunewell.workflows.prepare import prepare


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    torch.set_num_threads(1)
    write_base(tmp_path / "base", write_tokenizer(tmp_path / "tokenizer"))
    write_jsonl(tmp_path / "rows.jsonl", colour_rows(WORDINGS[:4]))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextmanager
def quietly(title: str) -> Iterator[Any]:
    yield silent


def swept(budget: str, *sets: str) -> Any:
    fixed = ["train.threads=1", "evaluate.samples=0", "device=cpu", *sets]
    options = SweepOptions(out=Path("swept"), budget=budget)
    return sweep(sets=fixed, model="base", data=["rows.jsonl"], options=options, shown=quietly)


@pytest.mark.slow
def test_the_recommended_settings_are_tried_first_and_judged_by_right_answers(folder: Path) -> None:
    """Guards the choice: no run may see a row of the verdict, and the result says whether the default is beaten."""
    found = swept("90s")
    assert found.runs[0].judged and "right" in found.conclusion
    first = next(run for run in found.runs if run.name.startswith("01"))
    assert first.settings["train.learning_rate"] == "0.001"
    assert found.best in (first, found.runs[0])
    assert "settings of `train`" in found.conclusion and found.next_command.startswith("tunewell train")
    assert len(found.runs) == 7 and len([run for run in found.runs if run.judged]) >= 2


def test_no_run_sees_a_row_of_the_verdict(folder: Path) -> None:
    """Settings that are chosen on held-out rows would make the verdict too good."""
    loaded = load_config({}, data="rows.jsonl", model="base")
    prepare(loaded)
    known = open_corpus("corpus")
    copy = load_config({}, selection_sets(Path("corpus"), Path("swept")), model="base")
    prepare(copy)
    own = open_corpus(Path("swept") / "corpus")

    def texts(split: Any) -> set[bytes]:
        return {split.arrays(index)[0].tobytes() for index in range(len(split))}

    assert texts(own) | texts(own.held_out) == texts(known) and len(own.held_out) >= 4
    assert not texts(own.held_out) & texts(own) and not texts(known.held_out) & texts(own.held_out)


def test_candidates_differ_in_one_value_that_the_user_did_not_set(folder: Path) -> None:
    given = ["train.epochs=2.0"]
    loaded = load_config({"train": {"learning_rate": 1e-3}}, given, data="rows.jsonl", model="base")
    base = with_recommended(loaded, prepare(loaded).manifest)
    first, *others = candidates(base)
    assert {own["train.epochs"] for own in others} == {2.0}
    rates = [own["train.learning_rate"] for own in others if own["train.learning_rate"] != first["train.learning_rate"]]
    assert sorted(float(rate) / float(first["train.learning_rate"]) for rate in rates) == [0.5, 2.0]
    for own in others:
        changed = {key for key in own if own[key] != first[key]} - {"method.alpha"}
        assert len(changed) == 1


def test_a_budget_for_less_than_two_runs_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="too short"):
        swept("1s")
    with pytest.raises(UserError, match="is not a time"):
        swept("ten")
    with pytest.raises(UserError, match="chooses the settings"):
        swept("10m", "train.epochs=1,2")
    assert parse_budget("1.5h") == 5_400


@pytest.mark.parametrize(("gain", "is_better"), [(2, False), (20, True)])
def test_it_says_whether_the_default_is_beaten(monkeypatch: pytest.MonkeyPatch, gain: int, is_better: bool) -> None:
    """Two of 100 answers more are chance; twenty more are not."""
    answers = {"a": [index < 50 for index in range(100)], "b": [index < 50 + gain for index in range(100)]}
    monkeypatch.setattr(
        module, "right_answers", lambda run: {("rows", index): own for index, own in enumerate(answers[run])}
    )
    results = [
        TrialResult(name, name, {"train.learning_rate": rate}, "finished", held_out=1.0)
        for name, rate in (("a", "0.001"), ("b", "0.002"))
    ]
    trials = [Trial(one.name, one.settings) for one in results]
    spec = SweepSpec({}, ["seed=1"], model="base", data=["my rows.jsonl"], judged_with=["data.selection=0"])
    found = conclude_budget(conclude(Path(), {"train.learning_rate": []}, results), spec, trials)
    assert found.best is not None and found.best.name == ("b" if is_better else "a")
    assert ("not beaten" in found.conclusion) != is_better
    command = "tunewell train --model base --data 'my rows.jsonl' --set seed=1"
    assert found.next_command == command + (" --set train.learning_rate=0.002" if is_better else "")
    assert json.dumps(found.as_json()) and found.runs[0].right == 50 + gain


def test_a_difference_that_the_best_of_six_reaches_by_chance_is_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """`not beaten` stood beside an interval above zero: the choice among several was counted, but not told."""
    right = {name: [index < (57 if name == "b" else 50) for index in range(100)] for name in "abcdefg"}
    monkeypatch.setattr(
        module, "right_answers", lambda run: {("rows", index): own for index, own in enumerate(right[run])}
    )
    results = [TrialResult(name, name, {"train.epochs": name}, "finished", held_out=1.0) for name in right]
    trials = [Trial(one.name, one.settings) for one in results]
    found = conclude_budget(conclude(Path(), {"train.epochs": []}, results), SweepSpec({}, []), trials)
    assert "not beaten" in found.conclusion and "which the best of 6 may reach by chance" in found.conclusion
