"""Pieces, shares and repeats: what is packed is what the documents were, no token twice and none forgotten."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tunewell.data.corpus.assembly import Documents
from tunewell.data.corpus.packing import mix_sources, repeat, split_long, whole_units, without_unsupervised


def documents_of(learned: list[list[bool]]) -> Documents:
    lengths = np.array([len(document) for document in learned], dtype=np.int32)
    number = len(lengths)
    return Documents(
        lengths=lengths,
        begins=np.cumsum(lengths, dtype=np.int64) - lengths,
        boundary=np.zeros(number, dtype=np.int32),
        source=np.zeros(number, dtype=np.int32),
        row=np.arange(number),
        is_held_out=np.zeros(number, dtype=bool),
        whole=np.zeros((number, 2), dtype=np.uint64),
        question=np.zeros((number, 2), dtype=np.uint64),
        tokens=np.arange(lengths.sum(), dtype=np.uint32),
        supervised=np.array([mark for document in learned for mark in document], dtype=bool),
        is_dropped=np.zeros(number, dtype=bool),
        is_selected=np.zeros(number, dtype=bool),
    )


def learned_document() -> st.SearchStrategy[list[bool]]:
    """A document as the assembly hands them over: the first token is given, some later one is learned."""
    rest = st.lists(st.booleans(), min_size=1, max_size=30).filter(any)
    return rest.map(lambda marks: [False, *marks])


@given(st.lists(learned_document(), min_size=1, max_size=8), st.integers(2, 12))
def test_every_supervised_token_of_a_split_document_is_learned_exactly_once(learned, context):
    """A piece begins with a token that is given; were it learned again, long documents would weigh more."""
    documents = documents_of(learned)
    units = split_long(whole_units(np.arange(len(documents)), documents.lengths), context)
    units = without_unsupervised(units, documents)
    times = np.zeros(len(documents.tokens), dtype=int)
    for document, start, length in zip(units.document, units.start, units.length, strict=True):
        assert 0 < length <= context
        begin = documents.begins[document] + start
        times[begin + 1 : begin + length] += documents.supervised[begin + 1 : begin + length]
    assert times.tolist() == documents.supervised.astype(int).tolist()
    assert units.num_pieces == len(units) - len(documents)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(2, 12))
def test_pieces_cover_a_document_and_overlap_by_one_token(lengths, context):
    """The token a piece begins with is what its second token is predicted from."""
    sizes = np.array(lengths, dtype=np.int32)
    units = split_long(whole_units(np.arange(len(sizes)), sizes), context)
    for document, whole in enumerate(lengths):
        own = units.document == document
        starts, ends = units.start[own], (units.start + units.length)[own]
        assert starts[0] == 0
        assert ends[-1] == whole
        assert (starts[1:] == ends[:-1] - 1).all()
        assert (units.length[own][:-1] == context).all(), "only the last piece may be short"
        assert own.sum() == 1 or whole > context


def test_a_piece_without_anything_to_learn_is_left_out():
    """A question longer than a sequence would otherwise fill sequences that teach nothing."""
    documents = documents_of([[False] * 8 + [True] * 2, [False, True]])
    units = without_unsupervised(split_long(whole_units(np.arange(2), documents.lengths), 4), documents)
    assert units.start.tolist() == [6, 0]
    assert units.num_pieces == 0


def sources_and_shares() -> st.SearchStrategy[tuple[list[int], list[float]]]:
    counts = st.lists(st.integers(0, 60), min_size=1, max_size=4)
    return counts.flatmap(
        lambda sizes: st.tuples(st.just(sizes), st.lists(st.integers(1, 20), min_size=len(sizes), max_size=len(sizes)))
    ).map(lambda pair: (pair[0], [weight / sum(pair[1]) for weight in pair[1]]))


@given(sources_and_shares(), st.integers(1, 6), st.randoms(use_true_random=False))
def test_sources_get_their_shares_of_all_documents(case, max_repeats, random):
    """A share of 30% means 30% of what is trained on, to the nearest document."""
    sizes, shares = case
    assume(sum(sizes))
    source = [index for index, size in enumerate(sizes) for _ in range(size)]
    random.shuffle(source)
    groups = np.array(source, dtype=np.int32)
    keys = np.array(random.sample(range(10_000), len(source)), dtype=np.uint64)
    mix = mix_sources(groups, keys, dict(enumerate(shares)), max_repeats)
    taken = [int(mix.copies[groups == index].sum()) for index in range(len(sizes))]
    filled = [share for size, share in zip(sizes, shares, strict=True) if size]
    total = sum(taken)
    for size, share, number in zip(sizes, shares, taken, strict=True):
        if size:
            assert abs(number - total * share / sum(filled)) <= 1 + len(sizes) / 2
    assert mix.copies.max() <= max_repeats
    needed = max(size / share for size, share in zip(sizes, shares, strict=True) if size)
    if all(needed * share <= size * max_repeats for size, share in zip(sizes, shares, strict=True) if size):
        assert mix.copies.min() >= 1, "documents are left out only where repeating the others is not enough"


def test_rarer_sources_are_repeated_before_others_are_left_out():
    """100 and 20 documents at half each: the 20 are used five times if allowed, else the 100 give way."""
    source = np.repeat([0, 1], [100, 20]).astype(np.int32)
    keys = np.arange(120, dtype=np.uint64)[::-1].copy()
    whole = mix_sources(source, keys, {0: 0.5, 1: 0.5}, max_repeats=5)
    assert whole.copies.tolist() == [1] * 100 + [5] * 20
    capped = mix_sources(source, keys, {0: 0.5, 1: 0.5}, max_repeats=2)
    assert capped.copies[source == 1].tolist() == [2] * 20
    assert np.flatnonzero(capped.copies[source == 0]).tolist() == list(range(60, 100)), "by content, not by place"
    assert whole.because[1] == "100 of 200 documents (50%) from 20"


def test_which_documents_are_sampled_does_not_depend_on_the_order_of_rows():
    """Sorting the input file must not change what is trained on."""
    random = np.random.default_rng(3)
    source, keys = random.integers(0, 2, 300).astype(np.int32), random.permutation(300).astype(np.uint64)
    shuffle = random.permutation(300)
    first = mix_sources(source, keys, {0: 0.9, 1: 0.1}, 2)
    second = mix_sources(source[shuffle], keys[shuffle], {0: 0.9, 1: 0.1}, 2)
    assert (first.copies[shuffle] == second.copies).all()


def test_a_source_without_documents_leaves_its_share_to_the_others():
    """Otherwise the figures on screen would speak of documents that are not there."""
    mix = mix_sources(np.zeros(10, dtype=np.int32), np.arange(10, dtype=np.uint64), {0: 0.25, 1: 0.75}, 4)
    assert mix.because == {1: "no documents; its share goes to the others", 0: "10 of 10 documents (100%) from 10"}


@pytest.mark.parametrize(("copies", "expected", "repeats"), [([1, 1], [0, 1], 0), ([3, 0], [0, 0, 0], 2)])
def test_repeats_are_counted(copies, expected, repeats):
    """The ledger counts a row once; copies are counted apart."""
    units = repeat(whole_units(np.arange(2), np.array([5, 6], dtype=np.int32)), np.array(copies))
    assert units.document.tolist() == expected
    assert units.num_repeats == repeats
