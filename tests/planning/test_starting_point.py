"""The first guess at epochs, rate and rank."""

import pytest

from tunewell.planning.starting_point import starting_point


@pytest.mark.parametrize(
    ("num_rows", "num_parameters", "epochs", "rate", "rank"),
    [
        (150, 134_515_008, 8, 1e-3, 16),
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


def test_more_rows_never_ask_for_more_epochs_or_a_smaller_adapter():
    """Guards against a table entered in the wrong order."""
    starts = [starting_point(10**power, 10**9) for power in range(7)]
    assert [s.epochs.value for s in starts] == sorted((s.epochs.value for s in starts), reverse=True)
    assert [s.rank.value for s in starts] == sorted(s.rank.value for s in starts)
