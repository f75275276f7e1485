"""The padding of other scripts: counted from lengths alone."""

import numpy as np
import pytest

from tunewell.core.errors import UserError
from tunewell.features.profile.padding import count_padding, padding_verdict


def _lengths(mean: float, longest: int, number: int) -> np.ndarray:
    """Lengths with a given mean and maximum."""
    rng = np.random.default_rng(1)
    lengths = np.clip(rng.normal(mean, 6, number).round().astype(np.int64), 12, longest)
    lengths[0] = longest
    missing = round(mean * number) - int(lengths.sum())
    lengths[1 : 1 + abs(missing)] += np.sign(missing)
    return lengths


def test_the_script_that_seemed_stuck_is_97_percent_padding() -> None:
    """Rows of 33.7 tokens on average and 67 at most, padded to 1,024: 30 times too much work, not 15."""
    lengths = _lengths(33.7, 67, 1000)
    padding = count_padding(lengths, 1024)
    assert padding.mean == pytest.approx(33.7, abs=0.1) and padding.longest == 67
    assert round(100 * padding.share) == 97 and padding.work == pytest.approx(30.4, abs=0.1)
    told = padding_verdict(padding, "rows.jsonl")
    assert "97% of the computed tokens are padding: 30.4 times too much work" in told
    assert "tunewell train --data rows.jsonl" in told and 'padding="longest"' in told


def test_rows_that_are_longer_are_truncated_and_counted() -> None:
    padding = count_padding(np.array([10, 30, 20]), 20)
    assert (padding.truncated_rows, padding.tokens, padding.padded_tokens) == (1, 50, 60)
    assert padding.longest_in_batch_tokens == 60


def test_rows_that_fill_their_length_have_no_padding() -> None:
    padding = count_padding(np.full(20, 128), 128)
    assert padding.share == 0 and padding.work == 1
    assert "packing saves little" in padding_verdict(padding, "rows.jsonl")


def test_padding_to_the_longest_of_a_batch_lies_between() -> None:
    padding = count_padding(_lengths(50, 120, 400), 256)
    assert padding.tokens < padding.longest_in_batch_tokens < padding.padded_tokens


def test_no_rows_is_a_plain_error() -> None:
    with pytest.raises(UserError, match="no rows"):
        count_padding(np.zeros(0, np.int64), 1024)
