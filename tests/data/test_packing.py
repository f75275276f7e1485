"""Packing: every document in exactly one sequence, hardly any room left."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples_limit import examples
from tunewell.data.corpus.packing import PackedSequences, choose_context_length, pack, padding_waste


@st.composite
def documents(draw, max_size: int = 60) -> tuple[list[int], int]:
    """Lengths, and a context that holds the longest of them."""
    context = draw(st.integers(1, 200))
    return draw(st.lists(st.integers(1, context), max_size=max_size)), context


def sequences_of(packing: PackedSequences) -> list[list[int]]:
    bounds = packing.starts.tolist()
    return [packing.order[a:b].tolist() for a, b in pairwise(bounds)]


def first_fit_decreasing(lengths: list[int], context: int) -> int:
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        place = next((index for index, room in enumerate(rooms) if room >= length), None)
        if place is None:
            rooms.append(context - length)
        else:
            rooms[place] -= length
    return len(rooms)


def chat_lengths(number: int, seed: int = 4) -> np.ndarray:
    """Lengths like those of a real set of chats: 186 tokens on average, 1,024 at most."""
    drawn = np.random.default_rng(seed).lognormal(np.log(186) - 0.15, 0.55, number)
    return np.clip(drawn, 8, 1024).astype(np.int64)


@given(documents())
def test_every_document_is_packed_exactly_once(case):
    """A document lost or doubled would change what is learned without a word."""
    lengths, context = case
    packing = pack(np.array(lengths, dtype=np.int64), context)
    assert sorted(packing.order.tolist()) == list(range(len(lengths)))


@given(documents())
def test_no_sequence_is_over_its_length_and_none_is_empty(case):
    """A sequence one token too long would be cut by whoever trains on it."""
    lengths, context = case
    packing = pack(np.array(lengths, dtype=np.int64), context)
    filled = [sum(lengths[index] for index in sequence) for sequence in sequences_of(packing)]
    assert all(0 < tokens <= context for tokens in filled)
    assert packing.num_tokens == sum(lengths)
    assert packing.num_padding == packing.num_sequences * context - sum(lengths)


@given(documents())
def test_equal_input_gives_equal_output_whatever_the_integer_type(case):
    """Corpora are compared byte by byte, on machines of every kind."""
    lengths, context = case
    first, second = (pack(np.array(lengths, dtype=dtype), context) for dtype in (np.int64, np.int32))
    assert first.order.tobytes() == second.order.tobytes()
    assert first.starts.tobytes() == second.starts.tobytes()


@settings(derandomize=True, max_examples=examples(400))
@given(documents())
def test_it_needs_at_most_one_sequence_more_than_first_fit_decreasing(case):
    """Filling rooms exactly must not be paid for at the end, with documents that fit nowhere."""
    lengths, context = case
    assert pack(np.array(lengths, dtype=np.int64), context).num_sequences <= first_fit_decreasing(lengths, context) + 1


def test_lengths_of_136_951_chats_pack_to_over_99_9_percent():
    """The bar: what static padding wastes five sixths of must be nearly all tokens."""
    lengths = chat_lengths(136_951)
    assert 180 < lengths.mean() < 192
    assert lengths.max() == 1024
    packing = pack(lengths, 1024)
    assert packing.efficiency >= 0.999
    assert packing.num_sequences == -(-int(lengths.sum()) // 1024), "there is no better packing than this"


@pytest.mark.parametrize("seed", range(5))
def test_a_few_thousand_chats_need_no_more_sequences_than_their_tokens_do(seed):
    """Small data is the usual case, and has no crowd of short documents to fill gaps with."""
    lengths = chat_lengths(4_000, seed)
    assert pack(lengths, 1024).num_sequences == -(-int(lengths.sum()) // 1024)


def test_documents_of_one_length_fill_sequences_in_their_order():
    """A packing that jumbled equal documents would be as full and harder to follow."""
    assert sequences_of(pack(np.full(7, 5), 17)) == [[0, 1, 2], [3, 4, 5], [6]]


def test_no_documents_make_no_sequences():
    """An empty held-out split is no error."""
    packing = pack(np.zeros(0, dtype=np.int64), 16)
    assert (packing.num_sequences, packing.num_padding, packing.efficiency) == (0, 0, 0.0)


@pytest.mark.parametrize("lengths", [[5, 17], [0, 3], [-1]])
def test_a_length_that_cannot_be_is_refused(lengths):
    """Documents that do not fit are cut or dropped by policy, never here."""
    with pytest.raises(ValueError, match="between 1 and 16"):
        pack(np.array(lengths), 16)


@pytest.mark.parametrize(
    ("longest", "wanted", "limit", "value", "because"),
    [
        (300, "auto", None, 1024, "the minimum"),
        (1024, "auto", 8192, 1024, "the minimum"),
        (1025, "auto", None, 1152, "rounded up to a multiple of 128"),
        (1025, "auto", 1100, 1100, "the model's limit"),
        (3000, "auto", 2048, 2048, "the model's limit"),
        (300, "auto", 512, 512, "the model's limit"),
        (300, 256, None, 256, "set in the config"),
        (300, 4096, 2048, 2048, "the config asks for 4,096"),
    ],
)
def test_the_context_is_chosen_with_a_reason(longest, wanted, limit, value, because):
    """A sequence longer than the model reads trains on positions it has never seen."""
    choice = choose_context_length(longest, wanted, limit)
    assert choice.value == value
    assert because in choice.because


def test_padding_waste_is_the_share_of_computed_tokens_that_are_none():
    """The figure that tells people why to pack."""
    assert padding_waste(np.array([256, 768]), 1024) == 0.5
    assert padding_waste(np.zeros(0, dtype=np.int64), 1024) == 0.0
