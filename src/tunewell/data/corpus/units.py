"""From documents to the units that are packed: whole documents, pieces of long ones, repeats of rare ones."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tunewell.data.corpus.assembly import Documents


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
