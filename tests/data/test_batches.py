"""The order of data is a pure function, and no cut of a step loses or doubles a document."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lessons import RandomDocuments

from tunewell.data.batches import (
    DataOrder,
    FixedShape,
    cumulative_lengths,
    make_batch,
    micro_batches,
    pad_to_shape,
    share_prefix,
)

lengths_of_documents = st.lists(st.integers(2, 50), min_size=1, max_size=60).map(np.array)


def _order(lengths: np.ndarray, **more: int | None) -> DataOrder:
    return DataOrder(lengths, 7, "abc", **{"batch_tokens": 64, **more})  # pyright: ignore[reportArgumentType]


@given(lengths_of_documents)
def test_every_epoch_sees_every_document_once(lengths: np.ndarray) -> None:
    order = _order(lengths)
    for epoch in range(3):
        seen = np.concatenate(order.steps_of_epoch(epoch))
        assert sorted(seen.tolist()) == list(range(len(lengths)))


@given(lengths_of_documents)
def test_a_step_holds_no_more_tokens_than_asked_unless_one_document_does(lengths: np.ndarray) -> None:
    for step in _order(lengths, batch_tokens=40).steps_of_epoch(0):
        assert lengths[step].sum() <= 40 or len(step) == 1


@given(lengths_of_documents)
def test_steps_by_number_are_the_steps_of_the_epochs_in_turn(lengths: np.ndarray) -> None:
    """Resume names a step by its number alone; it must be the step the unbroken run takes there."""
    order = _order(lengths)
    whole = [step for epoch in range(3) for step in order.steps_of_epoch(epoch)]
    fresh = _order(lengths)
    for number in reversed(range(len(whole))):
        assert fresh.step(number).documents.tolist() == whole[number].tolist()
    assert fresh.step(len(whole) - 1).seen == pytest.approx(3.0)


def test_how_many_epochs_so_many_steps_see_is_told_without_walking_through_all_of_them() -> None:
    """A hundred million steps took minutes and gigabytes before the first."""
    order = _order(np.random.default_rng(0).integers(1, 60, size=50))
    num_steps = order.num_steps(2.5)
    assert order.epochs_after(num_steps) == order.step(num_steps - 1).seen == pytest.approx(2.5, abs=0.05)
    exact = order.num_steps(1500)
    assert order.epochs_after(exact) == pytest.approx(1500, rel=1e-3)
    assert order.epochs_after(10**8) == pytest.approx(10**8 * 1500 / exact, rel=1e-3)
    # Back and forth, an epoch is always cut the same, and one alone is kept.
    assert [order.step(at).sha256 for at in (exact - 1, 0, exact - 1)] == [
        _order(order.lengths).step(at).sha256 for at in (exact - 1, 0, exact - 1)
    ]
    assert order._cut.cache_info().currsize == 1


def test_order_depends_on_seed_epoch_and_corpus_and_on_nothing_else() -> None:
    lengths = np.full(50, 5)
    base = DataOrder(lengths, 1, "abc", batch_documents=4)
    assert base.step(3).sha256 == DataOrder(lengths, 1, "abc", batch_documents=4).step(3).sha256
    others = [DataOrder(lengths, 2, "abc", batch_documents=4), DataOrder(lengths, 1, "abd", batch_documents=4)]
    assert len({order.step(3).sha256 for order in [base, *others]} | {base.step(16).sha256}) == 4


def test_a_part_of_an_epoch_has_the_steps_that_begin_in_it() -> None:
    order = DataOrder(np.full(40, 5), 0, "x", batch_documents=4)
    assert [order.num_steps(epochs) for epochs in (0.01, 0.5, 1.0, 1.05, 2.5)] == [1, 5, 10, 11, 25]


@given(lengths_of_documents, st.integers(2, 120))
def test_micro_batches_hold_each_document_of_the_step_once_within_the_budget(lengths: np.ndarray, budget: int) -> None:
    groups = micro_batches(np.arange(len(lengths)), lengths, budget)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(lengths)))
    for group in groups:
        assert lengths[group].sum() <= budget or len(group) == 1
        assert (np.diff(lengths[group]) <= 0).all(), "equal lengths must stand together"


def test_targets_are_the_next_token_of_the_same_document() -> None:
    """A shift over the packed row would pair the end of one document with the beginning of the next."""
    documents = RandomDocuments(6)
    batch = make_batch(documents, [3, 1, 4])
    at, pairs = 0, []
    for document in (3, 1, 4):
        ids, labels = documents.arrays(document)
        pairs += [(at + i, int(labels[i + 1])) for i in range(len(ids) - 1) if labels[i + 1] != -100]
        assert batch.position_ids[at : at + len(ids)].tolist() == list(range(len(ids)))
        at += len(ids)
    assert list(zip(batch.rows.tolist(), batch.targets.tolist(), strict=True)) == pairs


def test_filling_is_documents_of_its_own_and_is_not_learned() -> None:
    documents = RandomDocuments(6)
    batch = make_batch(documents, [0, 1, 2])
    shape = FixedShape(batch.num_tokens + 100, 16, 40)
    assert shape.fits(batch)
    filled = pad_to_shape(batch, shape)
    assert len(filled.input_ids) == len(filled.position_ids) == sum(filled.lengths) == shape.tokens
    assert filled.lengths[3:] == (40, 40, 20) and filled.rows is batch.rows
    bounds = cumulative_lengths(filled, shape.documents)
    assert len(bounds) == 17 and (np.diff(bounds) >= 0).all() and bounds[-1] == shape.tokens


def test_a_batch_whose_filling_needs_too_many_documents_does_not_fit() -> None:
    batch = make_batch(RandomDocuments(6), [0, 1, 2])
    assert not FixedShape(batch.num_tokens + 100, 5, 40).fits(batch)
    assert not FixedShape(batch.num_tokens - 1, 50, 40).fits(batch)


def _beginning(opening: list[int], *own: list[int]) -> RandomDocuments:
    documents = RandomDocuments(0)
    documents.rows = [(np.array([*opening, *ids], np.int32), np.array([*opening, *ids])) for ids in own]
    return documents


@given(st.integers(0, 20), st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=6))
def test_a_shared_opening_is_laid_out_once_and_every_token_finds_its_place(size: int, own: list[list[int]]) -> None:
    documents = _beginning(list(range(100, 100 + size)), *own)
    batch = make_batch(documents, range(len(own)))
    shared = share_prefix(batch, longest=512)
    if shared is None:
        assert size < 8 or len(own) == 1
        return
    assert 8 <= shared.size < min(batch.lengths)
    assert sum(shared.lengths) == len(shared.computed) == batch.num_tokens - shared.size * (len(own) - 1)
    assert all(length > 0 for length in shared.lengths)
    for name in ("input_ids", "position_ids"):
        values = getattr(batch, name)
        np.testing.assert_array_equal(values[shared.computed][shared.token_index], values)


def test_documents_that_are_the_same_keep_a_token_of_their_own() -> None:
    shared = share_prefix(make_batch(_beginning(list(range(12)), [7], [7]), [0, 1]), longest=512)
    assert shared is not None and shared.size == 12 and shared.lengths == (12, 1, 1)


def test_an_opening_is_not_shared_by_a_document_that_is_far_longer() -> None:
    batch = make_batch(_beginning(list(range(12)), [7] * 30, [8]), [0, 1])
    assert share_prefix(batch, longest=30) is not None and share_prefix(batch, longest=29) is None
