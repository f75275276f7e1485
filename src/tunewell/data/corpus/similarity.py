"""Find near-duplicate documents with MinHash-LSH, and check every candidate pair with the exact Jaccard similarity.

A document is the set of its shingles: all runs of `SHINGLE_TOKENS` tokens. A signature holds the smallest shingle hash
in each of `NUM_SLOTS` slots. Two signatures agree in a slot with a probability close to the Jaccard similarity.

    signature   slot 0 1 2 3 | 4 5 6 7 | ...     documents with equal slots in a band are candidates
"""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tunewell.core.arrays import Floats, Hashes, Ints, SmallInts, TokenIds

SHINGLE_TOKENS = 3
_SLOT_BITS = 6
NUM_SLOTS = 1 << _SLOT_BITS
_VALUE_MASK = np.uint32((1 << (32 - _SLOT_BITS)) - 1)
_EMPTY = np.uint32(0xFFFFFFFF)
_DISTANCE_ODD = 0x04000001
_DOCUMENTS_PER_CHUNK = 512
"""Small enough for the processor's cache: larger chunks take twice as long."""
_PAIRS_PER_CHUNK = 256
_PAIRS_PER_BATCH = 1 << 16
"""Pairs that are sorted by length together: more would take more memory and save no time."""
_BYTES_PER_WRITE = 1 << 22
_MIN_CHUNKS_FOR_THREADS = 64
"""Below it, starting threads takes longer than it saves."""
_MIN_RECALL = 0.999
"""Probability that the bands find a pair whose similarity is the threshold."""
_MARGIN = 0.1
"""Candidates whose estimated similarity is this far below the threshold are not checked: two standard errors."""
_COLLISIONS = 0.02
_MAX_OFFSET = 8
"""Earlier documents of a run with which a document is compared, besides the first."""
_ODD = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)

T = TypeVar("T")
Signatures = TokenIds


@dataclass(frozen=True)
class TokenLists:
    """Documents as slices of one array of tokens."""

    tokens: TokenIds
    begins: Ints
    lengths: npt.NDArray[np.integer[Any]]

    def __len__(self) -> int:
        return len(self.lengths)

    def shingles(self, documents: Ints, dtype: Any = np.uint64) -> tuple[npt.NDArray[Any], Ints]:
        """Return the shingle hashes of some documents, concatenated, and their number per document."""
        lengths, begins = self.lengths[documents].astype(np.int64), self.begins[documents]
        ends = begins + lengths
        if (begins[1:] >= ends[:-1]).all() and ends[-1] - begins[0] <= 2 * lengths.sum():
            tokens, begins = self.tokens[begins[0] : ends[-1]], begins - begins[0]  # neighbours: nothing is copied
        else:
            tokens, begins = self.tokens[_ranges(begins, lengths)], np.cumsum(lengths) - lengths
        counts = np.maximum(lengths - SHINGLE_TOKENS + 1, 0)
        num_shingles = max(len(tokens) - SHINGLE_TOKENS + 1, 0)
        odds = [dtype(odd & np.iinfo(dtype).max) for odd in _ODD]
        half = dtype(np.iinfo(dtype).bits // 2)
        hashes = np.zeros(num_shingles, dtype=dtype)
        for offset in range(SHINGLE_TOKENS):
            hashes += np.multiply(tokens[offset : num_shingles + offset], odds[offset], dtype=dtype)
        hashes ^= hashes >> half
        hashes *= odds[-1]
        hashes ^= hashes >> half
        return hashes[_ranges(begins, counts)], counts


@dataclass(frozen=True)
class NearPairs:
    """Documents that are similar to another document, each with one such document."""

    document: Ints
    other: Ints
    similarity: Floats

    def __len__(self) -> int:
        return len(self.document)


def sign(documents: TokenLists, slots_in_band: int, folder: Path | None = None) -> tuple[Signatures, Hashes]:
    """Return the MinHash signatures, (documents, NUM_SLOTS), and a hash of each band, (bands, documents).

    With a folder, both are mapped files, which take no memory if it is short.
    """
    num_bands = NUM_SLOTS // slots_in_band
    signatures = _allocate((len(documents), NUM_SLOTS), np.uint32, folder and folder / "signatures.bin")
    bands = _allocate((num_bands, len(documents)), np.uint64, folder and folder / "bands.bin")

    def sign_chunk(chunk: Ints) -> None:
        signatures[chunk[0] : chunk[-1] + 1] = _EMPTY
        hashes, counts = documents.shingles(chunk, np.uint32)
        slots = np.repeat(np.arange(len(chunk)) * NUM_SLOTS, counts) + (hashes >> np.uint32(32 - _SLOT_BITS))
        members = slice(chunk[0], chunk[-1] + 1)
        np.minimum.at(signatures[members].reshape(-1), slots, hashes & _VALUE_MASK)
        _fill_empty_slots(signatures[members])
        by_band = signatures[members, : num_bands * slots_in_band].reshape(len(chunk), num_bands, slots_in_band)
        keys = np.zeros((len(chunk), num_bands), dtype=np.uint64)
        for slot in range(slots_in_band):
            keys = (keys ^ by_band[:, :, slot]) * np.uint64(_ODD[0])
            keys ^= keys >> np.uint64(32)
        bands[:, members] = keys.T

    for _ in _in_threads(sign_chunk, _chunks(np.arange(len(documents)), _DOCUMENTS_PER_CHUNK)):
        pass
    return signatures, bands


def _allocate(shape: tuple[int, int], dtype: Any, path: Path | None) -> npt.NDArray[Any]:
    if path is None or not shape[0] * shape[1]:
        return np.empty(shape, dtype=dtype)
    num_bytes = shape[0] * shape[1] * np.dtype(dtype).itemsize
    with path.open("wb") as file:  # written in full: a write to a mapped page kills the process if the disk is full
        for start in range(0, num_bytes, _BYTES_PER_WRITE):
            file.write(bytes(min(_BYTES_PER_WRITE, num_bytes - start)))
    # Use a plain array over the same pages, because slicing a `memmap` object is slow.
    return np.asarray(np.memmap(path, dtype=dtype, mode="r+", shape=shape))


def _fill_empty_slots(signatures: Signatures) -> None:
    """Copy the next filled slot into each empty one, changed by the distance. Short documents have many empty ones."""
    rows, slots = np.nonzero(signatures == _EMPTY)
    has_values = ~(signatures == _EMPTY).all(axis=1)
    rows, slots = rows[has_values[rows]], slots[has_values[rows]]
    values = np.zeros(len(rows), dtype=np.uint32)
    missing = np.arange(len(rows))
    distance = 1
    while len(missing):
        found = signatures[rows[missing], (slots[missing] + distance) % NUM_SLOTS]
        values[missing] = found + np.uint32(distance) * np.uint32(_DISTANCE_ODD)
        missing = missing[found == _EMPTY]
        distance += 1
    signatures[rows, slots] = values


def slots_per_band(threshold: float) -> int:
    """Return the largest number of slots per band with which pairs at the threshold are found."""
    missed = {slots: (1 - threshold**slots) ** (NUM_SLOTS // slots) for slots in range(1, 9)}
    return max((slots for slots, share in missed.items() if 1 - share >= _MIN_RECALL), default=1)


class NearDuplicateSearch:
    """The signatures of some documents, and the search for similar ones."""

    def __init__(self, documents: TokenLists, threshold: float, folder: Path | None = None) -> None:
        self._documents = documents
        self._threshold = threshold
        self._signatures, self._bands = sign(documents, slots_per_band(threshold), folder)
        self._min_equal = int(np.ceil((threshold - _MARGIN) * NUM_SLOTS))
        self._is_compared = documents.lengths >= SHINGLE_TOKENS

    def exclude(self, documents: Ints) -> None:
        """Leave documents out of later searches."""
        self._is_compared[documents] = False

    def find(self, num_references: int | None = None) -> NearPairs:
        """Return every document that is similar to an earlier one, with one such document.

        With `num_references`, only the first `num_references` documents count as earlier.
        """
        other = np.full(len(self._documents), -1, dtype=np.int32)
        similarity = np.zeros(len(self._documents))
        rejected = other.copy()
        for keys in self._bands:
            best = np.full(len(self._documents), -1, dtype=np.int32)
            best_equal = np.full(len(self._documents), self._min_equal - 1, dtype=np.int8)
            for later, earlier in self._candidates(keys, num_references, other):
                equal = self._count_equal(later, earlier)
                is_best = (equal > best_equal[later]) & (rejected[later] != earlier)
                best[later[is_best]] = earlier[is_best]
                best_equal[later[is_best]] = equal[is_best]
            for batch in _chunks(np.flatnonzero(best >= 0), _PAIRS_PER_BATCH):
                exact = jaccard(self._documents, batch, best[batch].astype(np.int64), self._threshold)
                is_near = exact >= self._threshold
                other[batch[is_near]] = best[batch[is_near]]
                similarity[batch[is_near]] = exact[is_near]
                rejected[batch[~is_near]] = best[batch[~is_near]]
        found = np.flatnonzero(other >= 0)
        return NearPairs(found, other[found].astype(np.int64), similarity[found])

    def _candidates(
        self, keys: Hashes, num_references: int | None, other: SmallInts
    ) -> Iterator[tuple[SmallInts, SmallInts]]:
        """Yield pairs that agree in a band: each document with the first earlier one and with the last ones."""
        all_rows, starts = self._runs(keys)
        rows = all_rows
        num_earlier = np.arange(len(rows), dtype=np.int32) - starts
        if num_references is not None:
            # A run is sorted, so its references come first.
            num_before = np.cumsum(rows < num_references, dtype=np.int32)
            num_earlier = num_before - num_before[starts] + (rows[starts] < num_references)
        for offset in range(_MAX_OFFSET + 1):
            is_pair = (num_earlier > offset) & (rows >= (num_references or 0))
            if not offset:
                is_pair &= other[rows] < 0
            rows, starts, num_earlier = rows[is_pair], starts[is_pair], num_earlier[is_pair]
            yield rows, all_rows[starts + (num_earlier - offset if offset else 0)]

    def _runs(self, keys: Hashes) -> tuple[SmallInts, SmallInts]:
        """Return the documents that share a key with others, run by run, and the start of each one's run."""
        bits = np.uint64(max(len(keys) - 1, 1).bit_length())
        # Sorting the keys with the index in their low bits is faster than `argsort`.
        packed = keys[self._is_compared]
        packed >>= bits
        packed <<= bits
        packed |= np.flatnonzero(self._is_compared).view(np.uint64)
        packed.sort()
        is_repeat = np.zeros(len(packed), dtype=bool)
        # The keys of two neighbours are equal if only the low bits differ.
        is_repeat[1:] = packed[1:] ^ packed[:-1] < np.uint64(1) << bits
        is_in_run = is_repeat.copy()
        is_in_run[:-1] |= is_repeat[1:]
        rows = (packed[is_in_run] & ((np.uint64(1) << bits) - np.uint64(1))).astype(np.int32)
        del packed
        starts = np.where(is_repeat[is_in_run], np.int32(0), np.arange(len(rows), dtype=np.int32))
        return rows, np.maximum.accumulate(starts, out=starts)

    def _count_equal(self, later: SmallInts, earlier: SmallInts) -> npt.NDArray[np.int8]:
        """Return the number of slots in which the signatures of each pair agree."""

        def count(start: int) -> npt.NDArray[np.int8]:
            chunk = slice(start, start + _DOCUMENTS_PER_CHUNK)
            is_equal = self._signatures[later[chunk]] == self._signatures[earlier[chunk]]
            return np.count_nonzero(is_equal, axis=1).astype(np.int8)

        starts = range(0, len(later), _DOCUMENTS_PER_CHUNK)
        return np.concatenate([np.zeros(0, dtype=np.int8), *_in_threads(count, starts)])


def jaccard(documents: TokenLists, first: Ints, second: Ints, threshold: float = 0) -> Floats:
    """Return the exact Jaccard similarity of each pair, or any number below the threshold for pairs below it."""
    result, likely = np.zeros(len(first)), np.arange(len(first))
    if threshold:
        # Hashes of 32 bits are compared five times as fast. Two shingles rarely have the same one.
        likely = np.flatnonzero(_compare(documents, first, second, np.uint32) >= threshold - _COLLISIONS)
    result[likely] = _compare(documents, first[likely], second[likely], np.uint64)
    return result


def _compare(documents: TokenLists, first: Ints, second: Ints, dtype: Any) -> Floats:
    """Return the Jaccard similarity of each pair, by shingle hashes of a type."""
    result = np.zeros(len(first))

    def compare(chunk: Ints) -> None:
        sides = [documents.shingles(members[chunk], dtype) for members in (first, second)]
        starts = [np.zeros(len(chunk), dtype=np.int64), sides[0][1]]
        # One row per pair: the shingles of both documents, with the document in the lowest bit.
        width = int((sides[0][1] + sides[1][1]).max())
        padding = np.iinfo(dtype).max
        rows = np.full((len(chunk), width), padding, dtype=dtype)
        for side, (hashes, counts) in enumerate(sides):
            places = _ranges(np.arange(len(chunk)) * width + starts[side], counts)
            rows.reshape(-1)[places] = hashes << dtype(1) | dtype(side)
        rows.sort(axis=1)
        is_new = rows[:, 1:] != rows[:, :-1]
        is_common = is_new & (rows[:, 1:] ^ rows[:, :-1] == dtype(1))
        num_common = np.count_nonzero(is_common, axis=1)
        num_filled = np.count_nonzero(is_new & (rows[:, 1:] != padding), axis=1) + 1
        result[chunk] = num_common / (num_filled - num_common)

    # Pairs of similar length share a chunk, so that little is padded.
    by_length = np.argsort(documents.lengths[first] + documents.lengths[second], kind="stable")
    for _ in _in_threads(compare, _chunks(by_length, _PAIRS_PER_CHUNK)):
        pass
    return result


def _ranges(starts: Ints, counts: Ints) -> Ints:
    """Return `starts[i], starts[i] + 1, ...` for each i, `counts[i]` numbers, concatenated."""
    ends = np.cumsum(counts)
    return np.repeat(starts - ends + counts, counts) + np.arange(int(ends[-1]) if len(ends) else 0)


def _chunks(indices: Ints, size: int) -> Iterator[Ints]:
    return (indices[start : start + size] for start in range(0, len(indices), size))


def _in_threads(work: Callable[[Any], T], items: Iterable[Any]) -> Iterator[T]:
    """Yield the results in order. numpy releases the interpreter lock, so the threads work at the same time."""
    waiting = list(items)
    if len(waiting) < _MIN_CHUNKS_FOR_THREADS:
        yield from map(work, waiting)
        return
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        yield from pool.map(work, waiting)
