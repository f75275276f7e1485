"""Lay documents into sequences of one length, none cut, hardly any room left empty.

Works on a histogram of lengths: a sequence is designed once (longest document first, then the longest that fits, until
one or two lengths fill the rest exactly) and made as often as documents last, so the work grows with the number of
distinct lengths, not of documents. See docs/decisions/0006-packing.md for how it compares with best-fit decreasing.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tunewell.data.corpus.assembly import Documents

CONTEXT_STEP = 128
MIN_CONTEXT = 1024


@dataclass(frozen=True)
class Packing:
    """Which documents share a sequence.

    order   4 0 | 2 | 3 1 5        documents, sequence after sequence
    starts  0     2   3      6     where each sequence begins in `order`
    """

    context_length: int
    order: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    num_tokens: int

    @property
    def num_sequences(self) -> int:
        return len(self.starts) - 1

    @property
    def room_left(self) -> int:
        """Token slots that no document fills."""
        return self.num_sequences * self.context_length - self.num_tokens

    @property
    def efficiency(self) -> float:
        """The share of all token slots that hold a token, 0 to 1."""
        room = self.num_sequences * self.context_length
        return self.num_tokens / room if room else 0.0


def pack(lengths: npt.NDArray[np.integer], context_length: int) -> Packing:
    """Place every document in exactly one sequence; raise ValueError if one does not fit.

    Equal input gives equal output.
    """
    lengths = np.asarray(lengths)
    if len(lengths) and (lengths.max() > context_length or lengths.min() < 1):
        raise ValueError(f"document lengths must lie between 1 and {context_length}")
    counts = np.bincount(lengths) if len(lengths) else np.zeros(0, dtype=np.int64)
    by_length = np.argsort(lengths, kind="stable")
    next_of = (np.cumsum(counts) - counts).tolist()
    order = np.empty(len(lengths), dtype=np.int64)
    sizes, done = [], 0
    distinct = np.flatnonzero(counts).tolist()
    for times, design in _designs({length: int(counts[length]) for length in distinct}, context_length):
        columns = []
        for length, per_sequence in design.items():
            first = next_of[length]
            next_of[length] += times * per_sequence
            columns.append(by_length[first : next_of[length]].reshape(times, per_sequence))
        block = np.hstack(columns)
        order[done : done + block.size] = block.reshape(-1)
        sizes.append(np.full(times, block.shape[1]))
        done += block.size
    starts = np.concatenate([np.zeros(1, dtype=np.int64), *sizes]).cumsum()
    return Packing(context_length, order, starts, int(lengths.sum(dtype=np.int64)))


def _designs(counts: dict[int, int], context_length: int) -> Iterator[tuple[int, dict[int, int]]]:
    """Yield (how many sequences, {length: how many of it in each}) until no document is left."""
    shelf = _Shelf(counts, context_length)
    while shelf.longest():
        design: dict[int, int] = {}
        room = context_length
        while room:
            lengths = shelf.exact_fill(room, design) or shelf.longest_that_fits(room, design)
            if not lengths:
                break
            for length in lengths:
                design[length] = design.get(length, 0) + 1
                room -= length
        times = min(shelf.left[length] // per_sequence for length, per_sequence in design.items())
        shelf.remove(design, times)
        yield times, design


class _Shelf:
    """The documents still to be placed, by length; the bits of two big integers say which lengths there are.

    Bit n of `_there` stands for length n, bit (context - n) of `_mirrored` too: shifting the second and taking the
    common bits finds all pairs that fill a room exactly, at the cost of a few machine words.
    """

    def __init__(self, counts: dict[int, int], context_length: int) -> None:
        self.left = dict(counts)
        self._context_length = context_length
        self._there = sum(1 << length for length in counts)
        self._mirrored = sum(1 << (context_length - length) for length in counts)

    def longest(self) -> int:
        return self._there.bit_length() - 1 if self._there else 0

    def exact_fill(self, room: int, design: dict[int, int]) -> list[int]:
        """Find one length, or two as equal as can be, that fill the room to the last token."""
        if self._free(room, design):
            return [room]
        pairs = self._there & (self._mirrored >> (self._context_length - room)) & ((1 << room) - 1)
        half = (room + 1) // 2
        upper = pairs >> half
        while upper:
            longer = half + (upper & -upper).bit_length() - 1
            shorter = room - longer
            enough = self._free(longer, design) >= 2 if longer == shorter else self._free(shorter, design)
            if enough and self._free(longer, design):
                return [longer, shorter]
            upper &= upper - 1
        return []

    def longest_that_fits(self, room: int, design: dict[int, int]) -> list[int]:
        fitting = self._there & ((1 << (room + 1)) - 1)
        while fitting:
            length = fitting.bit_length() - 1
            if self._free(length, design):
                return [length]
            fitting ^= 1 << length
        return []

    def remove(self, design: dict[int, int], times: int) -> None:
        for length, per_sequence in design.items():
            self.left[length] -= times * per_sequence
            if not self.left[length]:
                self._there ^= 1 << length
                self._mirrored ^= 1 << (self._context_length - length)

    def _free(self, length: int, design: dict[int, int]) -> int:
        return self.left.get(length, 0) - design.get(length, 0)


@dataclass(frozen=True)
class ContextChoice:
    """How long a sequence is, and why."""

    value: int
    because: str


def choose_context(longest: int, wanted: int | str, limit: int | None) -> ContextChoice:
    """Pick the sequence length: the user's, or the longest document rounded up, never above the model's limit."""
    if isinstance(wanted, int):
        if limit is not None and wanted > limit:
            return ContextChoice(limit, f"{wanted:,} was asked for, but the model reads at most {limit:,} tokens")
        return ContextChoice(wanted, "set in the config")
    rounded = max(MIN_CONTEXT, -(-longest // CONTEXT_STEP) * CONTEXT_STEP)
    if limit is not None and rounded > limit:
        return ContextChoice(limit, f"the longest document has {longest:,} tokens; the model reads at most {limit:,}")
    if rounded == MIN_CONTEXT:
        return ContextChoice(rounded, f"the longest document has {longest:,} tokens; {MIN_CONTEXT:,} is the least")
    return ContextChoice(rounded, f"the longest document has {longest:,} tokens, rounded up to {CONTEXT_STEP}")


def padding_waste(lengths: npt.NDArray[np.integer], context_length: int) -> float:
    """Share of computed tokens that would be padding if every document were padded to the context length."""
    if not len(lengths):
        return 0.0
    return 1.0 - float(np.sum(lengths)) / (len(lengths) * context_length)


# From documents to the units that are packed: whole documents, pieces of long ones, repeats of rare ones.


@dataclass
class Units:
    """What goes into sequences: stretches of documents.

    A piece after the first begins with the last token of the piece before, which is given and not learned again, so
    every token of a split document is learned exactly once.
    """

    document: npt.NDArray[np.int64]
    start: npt.NDArray[np.int32]
    length: npt.NDArray[np.int32]
    num_pieces: int = 0
    """Units beyond the first of each split document."""
    num_repeats: int = 0
    """Units that are a further copy of a document."""

    def __len__(self) -> int:
        return len(self.document)


def whole_units(documents: npt.NDArray[np.int64], lengths: npt.NDArray[np.int32]) -> Units:
    """Take every document as one unit."""
    return Units(documents, np.zeros(len(documents), dtype=np.int32), lengths[documents].astype(np.int32))


def split_long(units: Units, context_length: int) -> Units:
    """Cut units that are too long into pieces that fit; of each piece after the first one token is not new.

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
    added = len(whole) - len(units)
    return Units(np.repeat(units.document, num_pieces), start, length, added, units.num_repeats)


def without_unlearned(units: Units, documents: Documents) -> Units:
    """Leave out pieces of split documents in which nothing is learned."""
    keep = np.ones(len(units), dtype=bool)
    for index in np.flatnonzero(units.length < documents.lengths[units.document]):
        begin = documents.begins[units.document[index]] + units.start[index]
        keep[index] = documents.learned[begin + 1 : begin + units.length[index]].any()
    removed = int((~keep).sum())
    return Units(
        units.document[keep], units.start[keep], units.length[keep], units.num_pieces - removed, units.num_repeats
    )


@dataclass(frozen=True)
class Mix:
    """How often each document is taken, and for each source how that came about."""

    copies: npt.NDArray[np.int64]
    because: dict[int, str]


def mix_sources(
    source: npt.NDArray[np.int32], order_key: npt.NDArray[np.uint64], shares: Mapping[int, float], max_repeats: int
) -> Mix:
    """Decide how often each document is taken so that sources have their shares of all documents.

    Every document is kept and the rarer sources are repeated, up to `max_repeats` times; only beyond that are
    documents of the others left out. Which ones are repeated or left out depends on their content alone. A source
    without documents leaves its share to the others.
    """
    counts = {index: int((source == index).sum()) for index in shares}
    filled = [index for index in shares if counts[index]]
    total_share = sum(shares[index] for index in filled)
    wanted = {index: shares[index] / total_share for index in filled}
    all_kept = max((counts[index] / wanted[index] for index in filled), default=0.0)
    allowed = min((counts[index] * max_repeats / wanted[index] for index in filled), default=0.0)
    total = min(all_kept, allowed)
    copies = np.zeros(len(source), dtype=np.int64)
    because = {index: "no documents; its share goes to the others" for index in shares if not counts[index]}
    for index in filled:
        own = np.flatnonzero(source == index)
        times, extra = divmod(round(total * wanted[index]), counts[index])
        copies[own] = times
        copies[own[np.argsort(order_key[own], kind="stable")[:extra]]] += 1
        taken = int(copies[own].sum())
        because[index] = f"{taken:,} of {round(total):,} documents ({wanted[index]:.0%}) from {counts[index]:,}"
    return Mix(copies, because)


def repeat(units: Units, copies: npt.NDArray[np.int64]) -> Units:
    """Repeat each unit as often as `copies` says."""
    return Units(
        np.repeat(units.document, copies),
        np.repeat(units.start, copies),
        np.repeat(units.length, copies),
        units.num_pieces,
        int(np.maximum(copies - 1, 0).sum()),
    )
