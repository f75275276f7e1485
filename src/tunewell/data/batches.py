"""Which documents a step learns from, in which order, and how they are laid into micro-batches.

corpus        permutation(seed, epoch, corpus hash)        a pure function: any step can be named without a replay
step k        the next documents up to `batch_tokens`      fixed, however much of it fits into memory at once
micro-batch   documents of a step, laid end to end         their sum is the step, whatever the split
"""

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
# From so many tokens on an opening that documents share is laid out once: with fewer, little is won.
_LEAST_OPENING = 8
_WALKED_EPOCHS = 1000


class Documents(Protocol):
    """Documents to learn from, as a split of a corpus gives them."""

    def __len__(self) -> int: ...

    def arrays(self, index: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Give a document's ids and labels."""
        ...

    index: Any
    """`length` and `supervised` of every document, by name."""


def spread(total: int, most: int | None) -> npt.NDArray[np.int64]:
    """Choose documents evenly from first to last: they lie source by source, and the first would be of one alone."""
    number = total if most is None else min(most, total)
    return np.unique(np.linspace(0, total - 1, number).round().astype(np.int64)) if number else np.zeros(0, np.int64)


@dataclass(frozen=True)
class Step:
    """The documents of one optimizer step."""

    number: int
    """Counted from 0."""
    epoch: int
    documents: Numbers
    seen: float
    """Epochs seen once it is done."""

    @cached_property
    def sha256(self) -> str:
        """Hash the documents in their order: equal runs have equal ones."""
        return hashlib.sha256(self.documents.astype("<i8").tobytes()).hexdigest()[:16]


@dataclass(frozen=True)
class DataOrder:
    """The order in which a run sees its documents, as a function of a few numbers."""

    lengths: Numbers
    seed: int
    corpus_sha256: str
    batch_tokens: int | None = None
    batch_documents: int | None = None

    def permutation(self, epoch: int) -> Numbers:
        """Give the order of all documents in an epoch."""
        key = hashlib.sha256(f"{self.seed}/{epoch}/{self.corpus_sha256}".encode()).digest()
        return np.random.Generator(np.random.PCG64(int.from_bytes(key[:16], "little"))).permutation(len(self.lengths))

    def steps_of_epoch(self, epoch: int) -> list[Numbers]:
        """Cut an epoch into steps, the last of which may be short; a document that is larger than a step is one."""
        order = self.permutation(epoch)
        if self.batch_documents is not None:
            return [order[at : at + self.batch_documents] for at in range(0, len(order), self.batch_documents)]
        assert self.batch_tokens is not None
        return [order[a:b] for a, b in _next_fit(self.lengths[order], self.batch_tokens)]

    def num_steps(self, epochs: float) -> int:
        """Count the steps of so many epochs; of a part of an epoch, those that begin within it."""
        whole, part = int(epochs), epochs - int(epochs)
        total = self._begin(whole)
        if part > 0:
            begins = np.cumsum([0] + [len(step) for step in self.steps_of_epoch(whole)])[:-1]
            total += int(np.sum(begins < part * len(self.lengths)))
        return max(1, total)

    def epochs_after(self, num_steps: int) -> float:
        """Say how many epochs so many steps see; by the average of the first thousand where there are more."""
        if any(self._begin(epoch) >= num_steps for epoch in range(1, _WALKED_EPOCHS + 1)):
            return self.step(num_steps - 1).seen
        return num_steps * _WALKED_EPOCHS / self._begin(_WALKED_EPOCHS)

    def step(self, number: int) -> Step:
        """Give the documents of a step, counted from 0 over all epochs."""
        begins = self._begins
        while begins[-1] <= number:
            self._begin(len(begins))
        epoch = bisect_right(begins, number) - 1
        steps = self._cut(epoch)
        place = number - begins[epoch]
        done = sum(len(step) for step in steps[: place + 1])
        return Step(number, epoch, steps[place], epoch + done / len(self.lengths))

    def _begin(self, epoch: int) -> int:
        """Give the first step of an epoch."""
        while len(self._begins) <= epoch:
            last = len(self._begins) - 1
            self._begins.append(self._begins[last] + len(self._cut(last)))
        return self._begins[epoch]

    @cached_property
    def _begins(self) -> list[int]:
        return [0]

    def _cut(self, epoch: int) -> list[Numbers]:
        """Cut an epoch, or remember how it was cut: of the last one alone, or long runs would fill the memory."""
        cuts: dict[int, list[Numbers]] = self.__dict__.setdefault("_cuts", {})
        if epoch not in cuts:
            cuts.clear()
            cuts[epoch] = self.steps_of_epoch(epoch)
        return cuts[epoch]


def _next_fit(lengths: Numbers, budget: int) -> list[tuple[int, int]]:
    """Cut a row of documents where the next would not fit, keeping their order."""
    ends = np.cumsum(lengths)
    cuts, begin = [], 0
    while begin < len(lengths):
        room = budget + (int(ends[begin - 1]) if begin else 0)
        end = max(begin + 1, int(np.searchsorted(ends, room, side="right")))
        cuts.append((begin, end))
        begin = end
    return cuts


def micro_batches(documents: Numbers, lengths: Numbers, budget: int, *, most: int | None = None) -> list[Numbers]:
    """Lay a step's documents into micro-batches of at most `budget` tokens and `most` documents, longest first.

    Documents of equal length come to stand together, which attention needs; sums do not depend on the order.
    """
    order = documents[np.lexsort((documents, -lengths[documents]))]
    groups: list[list[int]] = []
    room: list[int] = []
    for document in order.tolist():
        size = int(lengths[document])
        at = next(
            (i for i, free in enumerate(room) if free >= size and (most is None or len(groups[i]) < most)), len(groups)
        )
        if at == len(groups):
            groups.append([])
            room.append(max(budget, size))
        groups[at].append(document)
        room[at] -= size
    return [np.asarray(group, dtype=np.int64) for group in groups]


@dataclass(frozen=True)
class MicroBatch:
    """Documents laid end to end, as the model takes them."""

    input_ids: npt.NDArray[np.int64]
    position_ids: npt.NDArray[np.int64]
    lengths: tuple[int, ...]
    """Of the documents, then of the filling where there is any."""
    rows: npt.NDArray[np.int64]
    """Positions whose next token is learned."""
    targets: npt.NDArray[np.int64]
    """That next token."""
    documents: tuple[int, ...]
    num_tokens: int
    """Without filling."""


@dataclass(frozen=True)
class SharedOpening:
    """A batch with the beginning that its documents share laid out once, before what is each one's own."""

    size: int
    lengths: tuple[int, ...]
    """Of the opening, then of what each document has beyond it."""
    kept: npt.NDArray[np.int64]
    """Which tokens of the batch are computed."""
    places: npt.NDArray[np.int64]
    """For each token of the batch, which of the computed ones it is."""


@dataclass(frozen=True)
class FixedShape:
    """Shapes that a compiled model keeps: every micro-batch is filled up to so many tokens in so many documents."""

    tokens: int
    documents: int
    longest: int

    def fits(self, batch: MicroBatch) -> bool:
        """Whether a batch has room in this shape, with the documents that the filling makes."""
        spare = self.tokens - batch.num_tokens
        return spare >= 0 and len(batch.lengths) + -(-spare // self.longest) <= self.documents


def make_batch(split: Documents, documents: Sequence[int] | Numbers) -> MicroBatch:
    """Read documents and lay them end to end; the shift by one happens here, within each document."""
    read = [split.arrays(int(document)) for document in documents]
    ids = np.concatenate([own for own, _ in read]).astype(np.int64)
    labels = np.concatenate([own for _, own in read])
    lengths = np.array([len(own) for own, _ in read])
    ends = np.cumsum(lengths)
    following = np.full(len(ids), -100, dtype=np.int64)
    following[:-1] = labels[1:]
    following[ends - 1] = -100
    rows = np.flatnonzero(following != -100)
    return MicroBatch(
        input_ids=ids,
        position_ids=np.arange(len(ids)) - np.repeat(ends - lengths, lengths),
        lengths=tuple(lengths.tolist()),
        rows=rows,
        targets=following[rows],
        documents=tuple(int(document) for document in documents),
        num_tokens=len(ids),
    )


def pad_to_shape(batch: MicroBatch, shape: FixedShape) -> MicroBatch:
    """Fill a batch up to a fixed shape: the filling is documents of its own, and none of it is learned."""
    spare = shape.tokens - batch.num_tokens
    filling = [min(shape.longest, spare - at) for at in range(0, spare, shape.longest)]
    positions = [batch.position_ids, *(np.arange(length) for length in filling)]
    return replace(
        batch,
        input_ids=np.concatenate([batch.input_ids, np.zeros(spare, np.int64)]),
        position_ids=np.concatenate(positions).astype(np.int64),
        lengths=(*batch.lengths, *filling),
    )


def share_prefix(batch: MicroBatch, *, longest: int) -> SharedOpening | None:
    """Lay the tokens that all documents of a batch begin with out once; None where that saves next to nothing.

    What a token becomes depends on those before it in its document alone, so it is the same in all of them. Where
    one has more than `longest` tokens of its own, the opening is little of it.
    """
    if len(batch.lengths) < 2:
        return None
    starts = np.cumsum((0, *batch.lengths[:-1]))
    # Every document keeps a token of its own.
    most = min(batch.lengths) - 1
    heads = batch.input_ids[starts[:, None] + np.arange(most)]
    differing = np.flatnonzero((heads != heads[0]).any(0))
    size = int(differing[0]) if len(differing) else most
    if size < _LEAST_OPENING or max(batch.lengths) - size > longest:
        return None
    is_own = np.ones(len(batch.input_ids), bool)
    is_own[(starts[1:, None] + np.arange(size)).ravel()] = False
    places = np.cumsum(is_own) - 1
    places[(starts[1:, None] + np.arange(size)).ravel()] = np.tile(np.arange(size), len(starts) - 1)
    return SharedOpening(size, (size, *(length - size for length in batch.lengths)), np.flatnonzero(is_own), places)


def cumulative_lengths(batch: MicroBatch, num_documents: int | None = None) -> npt.NDArray[np.int32]:
    """Give where documents begin and end, followed by empty documents up to a fixed number of them."""
    ends = np.cumsum((0, *batch.lengths), dtype=np.int32)
    spare = 0 if num_documents is None else num_documents + 1 - len(ends)
    return np.concatenate([ends, np.full(spare, ends[-1], np.int32)])
