"""Reading ahead: the same documents in any order, errors where they are asked for, and nothing read twice."""

import threading

import numpy as np
import pytest

from tunewell.data.batches import make_batch
from tunewell.data.read_ahead import ReadAhead


class _Documents:
    """Documents of known content, that remember which thread read them."""

    def __init__(self, number: int) -> None:
        lengths = np.arange(2, number + 2)
        self.index = {"length": lengths, "supervised": lengths - 1}
        self.read: list[tuple[int, bool]] = []

    def __len__(self) -> int:
        return len(self.index["length"])

    def arrays(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        if index == 7:
            raise OSError("the disk is gone")
        self.read.append((index, threading.current_thread() is threading.main_thread()))
        ids = np.full(index + 2, index, np.int32)
        return ids, ids


def test_batches_are_the_same_whether_they_were_read_ahead_or_not() -> None:
    plain, ahead = _Documents(6), ReadAhead(_Documents(6))
    ahead.request([4, 1, 3])
    for documents in ([3, 1, 4], [0, 5, 2]):
        expected, found = make_batch(plain, documents), make_batch(ahead, documents)
        np.testing.assert_array_equal(found.input_ids, expected.input_ids)
        np.testing.assert_array_equal(found.targets, expected.targets)
    assert len(ahead) == 6 and ahead.index is not None


def test_what_was_requested_is_read_once_and_by_another_thread() -> None:
    documents = _Documents(6)
    ahead = ReadAhead(documents)
    ahead.request([1, 2])
    ahead.request([1, 2])
    for index in (1, 2, 3):
        ahead.arrays(index)
    assert sorted(documents.read) == [(1, False), (2, False), (3, True)]


def test_a_read_that_fails_is_raised_where_the_document_is_asked_for() -> None:
    """An error in another thread that nobody sees would train on other documents than planned."""
    ahead = ReadAhead(_Documents(9))
    ahead.request([7, 1])
    assert ahead.arrays(1)[0].tolist() == [1, 1, 1]
    with pytest.raises(OSError, match="the disk is gone"):
        ahead.arrays(7)


def test_requests_that_nobody_asked_for_are_dropped() -> None:
    """A quarantined document is requested and never read; a thousand of them would fill the memory."""
    ahead = ReadAhead(_Documents(6))
    ahead.request([1, 2])
    ahead.request([3])
    assert set(ahead._pending) == {3}
