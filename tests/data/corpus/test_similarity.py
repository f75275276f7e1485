"""Near duplicates: what is reported is exactly similar, and what is similar is found."""

import numpy as np
import pytest

from tunewell.data.corpus.similarity import (
    SHINGLE_TOKENS,
    NearDuplicateSearch,
    TokenLists,
    jaccard,
    slots_per_band,
)


def lists_of(documents: list[np.ndarray]) -> TokenLists:
    lengths = np.array([len(document) for document in documents], dtype=np.int64)
    tokens = np.concatenate(documents).astype(np.uint32)
    return TokenLists(tokens, np.cumsum(lengths) - lengths, lengths)


def edited(rng: np.random.Generator, document: np.ndarray, num_edits: int) -> np.ndarray:
    copy = document.copy()
    copy[rng.integers(0, len(copy), num_edits)] = rng.integers(0, 5000, num_edits)
    return copy


def families(seed: int, num_families: int, size: int, max_edits: int) -> list[np.ndarray]:
    """Edited copies of random documents, of 5 to 200 tokens each, in random order."""
    rng = np.random.default_rng(seed)
    parents = [rng.integers(0, 5000, rng.integers(5, 200)) for _ in range(num_families)]
    copies = [edited(rng, parent, rng.integers(0, max_edits)) for parent in parents for _ in range(size)]
    return [copies[index] for index in rng.permutation(len(copies))]


def shingle_sets(documents: list[np.ndarray]) -> list[set[tuple[int, ...]]]:
    return [
        {tuple(document[i : i + SHINGLE_TOKENS]) for i in range(len(document) - SHINGLE_TOKENS + 1)}
        for document in (document.tolist() for document in documents)
    ]


def similarity(first: set, second: set) -> float:
    return len(first & second) / len(first | second) if first | second else 0.0


def test_similarity_is_exact():
    """Guards the check that decides what is dropped: hashes, repeated shingles and padding must not change it."""
    documents = families(0, num_families=12, size=5, max_edits=20)
    documents += [np.array([7, 7, 7, 7, 7, 7]), np.array([7, 7, 7]), np.array([1, 2])]
    sets = shingle_sets(documents)
    first, second = (side.reshape(-1) for side in np.indices((len(documents), len(documents))))
    expected = [similarity(sets[a], sets[b]) for a, b in zip(first, second, strict=True)]
    assert jaccard(lists_of(documents), first, second) == pytest.approx(expected, abs=0)


@pytest.mark.parametrize(("threshold", "max_edits"), [(0.5, 8), (0.8, 8), (0.95, 3)])
def test_similar_documents_are_found_and_no_others(threshold, max_edits):
    """Guards recall of the bands, also for short documents and for large families; every report must be right."""
    documents = families(1, num_families=30, size=16, max_edits=max_edits)
    sets = shingle_sets(documents)
    pairs = NearDuplicateSearch(lists_of(documents), threshold).find()
    true = {
        later
        for later in range(len(documents))
        if any(similarity(sets[later], sets[earlier]) >= threshold for earlier in range(later))
    }
    found = set(pairs.document.tolist())
    assert found <= true
    assert len(found) >= 0.97 * len(true) > 100
    for later, earlier, value in zip(pairs.document, pairs.other, pairs.similarity, strict=True):
        assert earlier < later
        assert similarity(sets[later], sets[earlier]) == value >= threshold


def test_only_references_count_as_earlier():
    """Guards the search for leaks: a training row similar to another training row is not a leak."""
    rng = np.random.default_rng(2)
    held_out, other = rng.integers(0, 5000, 100), rng.integers(0, 5000, 100)
    documents = [held_out, other, edited(rng, held_out, 2), edited(rng, other, 2), edited(rng, other, 2)]
    search = NearDuplicateSearch(lists_of(documents), 0.8)
    leaks = search.find(num_references=1)
    assert (leaks.document.tolist(), leaks.other.tolist()) == ([2], [0])
    search.exclude(np.array([0, 1]))
    assert search.find().document.tolist() == [4]


def test_bands_follow_the_threshold():
    """Guards low thresholds, at which bands of four slots would miss a third of the pairs."""
    assert slots_per_band(0.8) == 4
    assert slots_per_band(0.5) == 2
    assert slots_per_band(0.95) > 4
