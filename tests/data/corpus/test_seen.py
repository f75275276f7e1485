"""The set of digests behaves like a set, at a quarter of its memory."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tunewell.data.corpus.seen import SeenDigests


def digests(numbers: list[int]) -> np.ndarray:
    # Multiplied so that many share their low bits, which choose the slot.
    return np.array([[number << 20, number] for number in numbers], dtype="<u8").reshape(-1, 2).view(np.uint8)


@given(st.lists(st.lists(st.integers(0, 60), max_size=40), max_size=6))
def test_each_digest_is_new_once(batches):
    """A duplicate that is missed crosses into the held-out rows; a false one loses a row."""
    seen, expected = SeenDigests(), set()
    for batch in batches:
        assert seen.contains(digests(batch)).tolist() == [number in expected for number in batch]
        news = [number not in expected and number not in batch[:index] for index, number in enumerate(batch)]
        assert seen.add(digests(batch)).tolist() == news
        expected.update(batch)
        assert len(seen) == len(expected)


def test_a_hundred_thousand_digests_are_all_found_again():
    """The table grows several times on the way; nothing may get lost in a move."""
    rows = np.random.default_rng(1).integers(0, 256, (100_000, 16), dtype=np.uint8)
    seen = SeenDigests()
    for start in range(0, len(rows), 1_000):
        assert seen.add(rows[start : start + 1_000]).all()
    assert seen.contains(rows).all()
    assert not seen.add(rows[::7]).any()
    assert not seen.contains(np.random.default_rng(2).integers(0, 256, (1_000, 16), dtype=np.uint8)).any()


def test_the_digest_of_zeros_is_a_digest_like_any_other():
    """Zero marks a free slot, so it must not be a value too."""
    seen = SeenDigests()
    zeros = np.zeros((1, 16), dtype=np.uint8)
    assert not seen.contains(zeros).any()
    assert seen.add(zeros).all()
    assert seen.contains(zeros).all()
