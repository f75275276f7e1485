"""What a sweep tries, and what it concludes."""

import json
import math
from pathlib import Path

import pytest

from tunewell.core.errors import UserError
from tunewell.features.sweep.runner import data_key
from tunewell.features.sweep.sweep import (
    SweepSpec,
    Trial,
    TrialResult,
    conclude,
    make_trials,
    margin_interval,
    parse_sets,
    read_sweep,
    repetitions,
    require_same_sweep,
    split_alternatives,
    write_sweep,
)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("8,32", ["8", "32"]),
        ("[q_proj,v_proj],[q_proj]", ["[q_proj,v_proj]", "[q_proj]"]),
        ("[[0, 1], 2]", ["[[0, 1], 2]"]),
        ("{a: 1, b: 2}, {a: 3}", ["{a: 1, b: 2}", "{a: 3}"]),
        ("\"a, b\",'c, d'", ['"a, b"', "'c, d'"]),
        ("1e-4", ["1e-4"]),
        ("a,", ["a", ""]),
    ],
)
def test_commas_separate_alternatives_but_not_inside_lists(text: str, parts: list[str]) -> None:
    """A list is one value; splitting it would train with half of it."""
    assert split_alternatives(text) == parts


def test_bad_alternatives_are_refused() -> None:
    """Empty, doubled and missing alternatives are errors of the command, not settings."""
    for sets in (["a=1,"], ["a=1,1"], ["a=1,2", "a=3,4"]):
        with pytest.raises(UserError):
            parse_sets(sets)
    fixed, alternatives = parse_sets(["seed=3", "train.max_steps=4,8", "novalue"])
    assert (fixed, alternatives) == (["seed=3", "novalue"], {"train.max_steps": ["4", "8"]})
    for values in ({}, {"a": ["1"]}):
        with pytest.raises(UserError):
            make_trials(values)
    with pytest.raises(UserError, match="combinations"):
        make_trials({key: [str(value) for value in range(11)] for key in "abc"})


def test_every_combination_is_a_run_with_its_own_name() -> None:
    """Names are folders: distinct, and without characters that a shell or a disk treats specially."""
    trials = make_trials({"train.learning_rate": ["1e-4", "1e-3"], "data.sources": ["[a/b.jsonl]", "[c d]"]})
    assert len(trials) == 4 == len({trial.name for trial in trials})
    assert all(set(trial.name) <= set("abcdefghijklmnopqrstuvwxyz0123456789_.-+") for trial in trials)
    assert trials[0].sets() == ["train.learning_rate=1e-4", "data.sources=[a/b.jsonl]"]


def result(name: str, loss: float | None, status: str = "finished", **settings: str) -> TrialResult:
    return TrialResult(name, f"sweep/{name}", settings, status, held_out=loss)


def test_the_best_run_is_named_with_its_margin() -> None:
    """Runs that failed, were interrupted or have no finite loss are never the best."""
    results = [
        result("a", 1.5, lr="1"),
        result("b", 1.2, lr="2"),
        result("c", 0.5, "interrupted", lr="3"),
        result("d", math.nan, lr="4"),
        result("e", None, "failed", lr="5"),
    ]
    found = conclude(Path("sweep"), {"lr": ["1", "2"]}, results)
    assert found.best is not None and found.best.name == "b"
    assert found.margin == pytest.approx(0.3) and found.interval is None
    assert "`--seeds 3`" in found.conclusion
    assert [run.name for run in found.runs[:2]] == ["b", "a"]
    nothing = conclude(Path("sweep"), {}, results[2:])
    assert nothing.best is None and nothing.exit_code == 1
    assert json.dumps(found.as_json(), allow_nan=False)


def test_noise_over_seeds_decides_whether_the_margin_counts() -> None:
    """A margin of the size of the spread over seeds is called noise."""
    clear = [result(f"a{seed}", 1.0 + seed / 1000, lr="1", seed=str(seed)) for seed in range(3)]
    clear += [result(f"b{seed}", 2.0 + seed / 1000, lr="2", seed=str(seed)) for seed in range(3)]
    found = conclude(Path("sweep"), {"lr": ["1", "2"]}, clear)
    assert "more than noise" in found.conclusion and found.interval is not None and found.interval[0] > 0.9
    noisy = [result(f"a{seed}", 1.0 + seed / 2, lr="1", seed=str(seed)) for seed in range(3)]
    noisy += [result(f"b{seed}", 1.1 + seed / 2, lr="2", seed=str(seed)) for seed in range(3)]
    assert "within noise" in conclude(Path("sweep"), {"lr": ["1", "2"]}, noisy).conclusion


def test_the_interval_is_that_of_welch() -> None:
    """Against values from R: t.test(c(5,6,7,8), c(1,2,4,3)), difference 4, 95% from 1.766 to 6.234."""
    low, high = margin_interval([1, 2, 4, 3], [5, 6, 7, 8]) or (0, 0)
    assert (low, high) == (pytest.approx(1.766, abs=0.01), pytest.approx(6.234, abs=0.01))
    assert margin_interval([1], [2, 3]) is None
    assert margin_interval([1, 1], [2, 2]) == (1, 1)


def test_the_two_best_settings_are_repeated() -> None:
    """Further seeds go to the two best settings only, and known runs are not repeated."""
    trials = [Trial(name, {"lr": lr}) for name, lr in (("a", "1"), ("b", "2"), ("c", "3"))]
    results = [result("a", 3.0, lr="1"), result("b", 1.0, lr="2"), result("c", 2.0, lr="3")]
    more = repetitions(trials, results, [0, 1, 2])
    assert [trial.settings for trial in more] == [
        {"lr": "2", "seed": "1"},
        {"lr": "2", "seed": "2"},
        {"lr": "3", "seed": "1"},
        {"lr": "3", "seed": "2"},
    ]
    assert repetitions([*trials, *more], results, [0, 1, 2]) == more


def test_only_settings_of_the_data_need_another_corpus() -> None:
    """A corpus is prepared once per distinct data setting; the seed keeps it, so that held-out rows are the same."""
    base = data_key(Trial("a", {"train.learning_rate": "1", "seed": "1"}))
    assert base == data_key(Trial("b", {"method.rank": "8", "lr": "3"}))
    for key in ("data.held_out", "template.name", "packing.context_length", "model", "tokenizer", "method.adapter"):
        assert data_key(Trial("c", {key: "x"})) != base, key


def test_another_sweep_in_the_folder_is_refused(tmp_path: Path) -> None:
    """Resuming with other alternatives would mix two sweeps."""
    spec = SweepSpec({"a": ["1", "2"]}, ["b=3"], None, "model", ["rows.jsonl"])
    trials = make_trials(spec.alternatives)
    write_sweep(tmp_path, spec, trials)
    assert require_same_sweep(tmp_path, spec) == trials
    assert read_sweep(tmp_path) == (spec, trials)
    with pytest.raises(UserError, match="alternatives"):
        require_same_sweep(tmp_path, SweepSpec({"a": ["1", "9"]}, ["b=3"], None, "model", ["rows.jsonl"]))
    for text in ("", "{", "[]", '{"format_version": 1}', '{"format_version": 99}'):
        (tmp_path / "sweep.json").write_text(text)
        with pytest.raises(UserError):
            read_sweep(tmp_path)
    with pytest.raises(UserError, match="no sweep"):
        read_sweep(tmp_path / "nothing")
