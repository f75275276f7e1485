"""Pack documents into sequences of one length: no document is cut, and almost no token slot stays empty.

The algorithm works on a histogram of lengths. It designs a sequence once (the longest document first, then the longest
that fits, until one or two lengths fill the rest exactly) and repeats the design until its documents are used up. The
run time therefore grows with the number of distinct lengths, not of documents. docs/decisions/0006-packing.md compares
it with best-fit decreasing.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tunewell.core.arrays import Hashes, Ints, SmallInts
from tunewell.data.corpus.assembly import Documents
from tunewell.records.plan import Chosen

CONTEXT_STEP = 128
MIN_CONTEXT = 1024


@dataclass(frozen=True)
class PackedSequences:
    """The assignment of documents to sequences.

    order   4 0 | 2 | 3 1 5        documents, sequence by sequence
    starts  0     2   3      6     index of each sequence in `order`
    """

    context_length: int
    order: Ints
    starts: Ints
    num_tokens: int

    @property
    def num_sequences(self) -> int:
        return len(self.starts) - 1

    @property
    def num_padding(self) -> int:
        """The number of token slots without a token."""
        return self.num_sequences * self.context_length - self.num_tokens

    @property
    def efficiency(self) -> float:
        """The share of token slots with a token, 0 to 1."""
        num_slots = self.num_sequences * self.context_length
        return self.num_tokens / num_slots if num_slots else 0.0


def pack(lengths: npt.NDArray[np.integer], context_length: int) -> PackedSequences:
    """Assign every document to one sequence, deterministically; raise ValueError if a document does not fit."""
    lengths = np.asarray(lengths)
    if len(lengths) and (lengths.max() > context_length or lengths.min() < 1):
        raise ValueError(f"document lengths must be between 1 and {context_length}")
    counts = np.bincount(lengths) if len(lengths) else np.zeros(0, dtype=np.int64)
    by_length = np.argsort(lengths, kind="stable")
    next_of = (np.cumsum(counts) - counts).tolist()
    order = np.empty(len(lengths), dtype=np.int64)
    sizes: list[Ints] = []
    done = 0
    distinct = np.flatnonzero(counts).tolist()
    for times, design in _designs({length: int(counts[length]) for length in distinct}, context_length):
        columns: list[Ints] = []
        for length, per_sequence in design.items():
            first = next_of[length]
            next_of[length] += times * per_sequence
            columns.append(by_length[first : next_of[length]].reshape(times, per_sequence))
        block = np.hstack(columns)
        order[done : done + block.size] = block.reshape(-1)
        sizes.append(np.full(times, block.shape[1]))
        done += block.size
    starts = np.concatenate([np.zeros(1, dtype=np.int64), *sizes]).cumsum()
    return PackedSequences(context_length, order, starts, int(lengths.sum(dtype=np.int64)))


def _designs(counts: dict[int, int], context_length: int) -> Iterator[tuple[int, dict[int, int]]]:
    """Yield (number of sequences, {length: number of documents in each sequence}) until no document is left."""
    remaining = _RemainingLengths(counts, context_length)
    while remaining.longest():
        design: dict[int, int] = {}
        free = context_length
        while free:
            lengths = remaining.exact_fill(free, design) or remaining.longest_that_fits(free, design)
            if not lengths:
                break
            for length in lengths:
                design[length] = design.get(length, 0) + 1
                free -= length
        times = min(remaining.counts[length] // per_sequence for length, per_sequence in design.items())
        remaining.remove(design, times)
        yield times, design


class _RemainingLengths:
    """The lengths of the documents that are not packed yet, as bits of two big integers.

    Length n sets bit n of `_bits` and bit (context - n) of `_mirrored`. Shifting `_mirrored` and intersecting it with
    `_bits` finds all pairs that fill a gap exactly, with a few machine operations.
    """

    def __init__(self, counts: dict[int, int], context_length: int) -> None:
        self.counts = dict(counts)
        self._context_length = context_length
        self._bits = sum(1 << length for length in counts)
        self._mirrored = sum(1 << (context_length - length) for length in counts)

    def longest(self) -> int:
        return self._bits.bit_length() - 1 if self._bits else 0

    def exact_fill(self, free: int, design: dict[int, int]) -> list[int]:
        """Return one length, or two lengths that are as equal as possible, with a sum of exactly `free` tokens."""
        if self._available(free, design):
            return [free]
        pairs = self._bits & (self._mirrored >> (self._context_length - free)) & ((1 << free) - 1)
        half = (free + 1) // 2
        upper = pairs >> half
        while upper:
            longer = half + (upper & -upper).bit_length() - 1
            shorter = free - longer
            enough = self._available(longer, design) >= 2 if longer == shorter else self._available(shorter, design)
            if enough and self._available(longer, design):
                return [longer, shorter]
            upper &= upper - 1
        return []

    def longest_that_fits(self, free: int, design: dict[int, int]) -> list[int]:
        fitting = self._bits & ((1 << (free + 1)) - 1)
        while fitting:
            length = fitting.bit_length() - 1
            if self._available(length, design):
                return [length]
            fitting ^= 1 << length
        return []

    def remove(self, design: dict[int, int], times: int) -> None:
        for length, per_sequence in design.items():
            self.counts[length] -= times * per_sequence
            if not self.counts[length]:
                self._bits ^= 1 << length
                self._mirrored ^= 1 << (self._context_length - length)

    def _available(self, length: int, design: dict[int, int]) -> int:
        return self.counts.get(length, 0) - design.get(length, 0)


def choose_context_length(longest: int, requested: int | str, limit: int | None) -> Chosen[int]:
    """Return the requested length or the rounded length of the longest document, up to the model's limit."""
    if isinstance(requested, int):
        value, because = requested, "set in the config"
        at_limit = f"the model's limit; the config asks for {requested:,}"
    else:
        value = max(MIN_CONTEXT, -(-longest // CONTEXT_STEP) * CONTEXT_STEP)
        because = f"your longest row has {longest:,} tokens, rounded up to a multiple of {CONTEXT_STEP}"
        if value == MIN_CONTEXT:
            because = f"the minimum; your longest row has {longest:,} tokens"
        at_limit = f"the model's limit; your longest row has {longest:,} tokens"
    if limit is not None and value > limit:
        value, because = limit, at_limit
    return Chosen(value=value, because=because)


def padding_waste(lengths: npt.NDArray[np.integer], context_length: int) -> float:
    """Return the share of padding tokens if every document were padded to the context length."""
    if not len(lengths):
        return 0.0
    return 1.0 - float(np.sum(lengths)) / (len(lengths) * context_length)


@dataclass
class Units:
    """The units that are packed into sequences: whole documents, or pieces of long documents.

    Every piece except the first begins with the last token of the previous piece. That token is context and not
    supervised again, so no token of a split document is supervised twice.
    """

    document: Ints
    start: SmallInts
    length: SmallInts
    num_pieces: int = 0
    """Number of pieces of split documents, without the first piece of each document."""
    num_repeats: int = 0
    """Number of additional copies of documents."""

    def __len__(self) -> int:
        return len(self.document)


def whole_units(documents: Ints, lengths: SmallInts) -> Units:
    """Return one unit for each document."""
    return Units(documents, np.zeros(len(documents), dtype=np.int32), lengths[documents].astype(np.int32))


def split_long(units: Units, context_length: int) -> Units:
    """Split units that are too long into pieces that overlap by one token.

    length 10, context 4:   0123
                               3456
                                  6789
    """
    is_long = units.length > context_length
    if not is_long.any():
        return units
    new_tokens = context_length - 1
    num_pieces = np.where(is_long, -(-(units.length - 1) // new_tokens), 1)
    whole = np.repeat(units.length, num_pieces)
    number = np.arange(len(whole)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    start = (number * new_tokens).astype(np.int32)
    length = np.minimum(whole - start, context_length).astype(np.int32)
    return Units(np.repeat(units.document, num_pieces), start, length, num_pieces=len(whole) - len(units))


def without_unsupervised(units: Units, documents: Documents) -> Units:
    """Remove pieces of split documents that have no supervised token."""
    keep = np.ones(len(units), dtype=bool)
    for index in np.flatnonzero(units.length < documents.lengths[units.document]):
        begin = documents.begins[units.document[index]] + units.start[index]
        keep[index] = documents.supervised[begin + 1 : begin + units.length[index]].any()
    num_pieces = units.num_pieces - int((~keep).sum())
    return Units(units.document[keep], units.start[keep], units.length[keep], num_pieces)


@dataclass(frozen=True)
class Mix:
    """The number of copies of each document, with a reason for each source."""

    copies: Ints
    because: dict[int, str]


def mix_sources(source: SmallInts, order_key: Hashes, shares: Mapping[int, float], max_repeats: int) -> Mix:
    """Choose the number of copies of each document so that every source has its share of all documents.

    Small sources are repeated up to `max_repeats` times; only then are documents of the other sources dropped. A hash
    of the content decides which documents are repeated or dropped. The share of an empty source goes to the others.
    """
    counts = {index: int((source == index).sum()) for index in shares}
    filled = [index for index in shares if counts[index]]
    total_share = sum(shares[index] for index in filled)
    target = {index: shares[index] / total_share for index in filled}
    all_kept = max((counts[index] / target[index] for index in filled), default=0.0)
    allowed = min((counts[index] * max_repeats / target[index] for index in filled), default=0.0)
    total = min(all_kept, allowed)
    copies = np.zeros(len(source), dtype=np.int64)
    because = {index: "no documents; its share goes to the others" for index in shares if not counts[index]}
    for index in filled:
        members = np.flatnonzero(source == index)
        times, extra = divmod(round(total * target[index]), counts[index])
        copies[members] = times
        copies[members[np.argsort(order_key[members], kind="stable")[:extra]]] += 1
        taken = int(copies[members].sum())
        because[index] = f"{taken:,} of {round(total):,} documents ({target[index]:.0%}) from {counts[index]:,}"
    return Mix(copies, because)


def repeat(units: Units, copies: Ints) -> Units:
    """Return `copies` copies of each unit."""
    document, start = np.repeat(units.document, copies), np.repeat(units.start, copies)
    num_repeats = int(np.maximum(copies - 1, 0).sum())
    return Units(document, start, np.repeat(units.length, copies), units.num_pieces, num_repeats)
