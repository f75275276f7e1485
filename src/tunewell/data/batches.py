"""The data order of training: which documents each optimizer step uses, and how they form micro-batches.

corpus        permutation(seed, epoch, corpus hash)        a pure function: any step can be computed directly
step k        the next documents up to `batch_tokens`      does not depend on the size of the micro-batches
micro-batch   documents of a step, concatenated            the sum over all micro-batches is the step
"""

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Protocol

import numpy as np

from tunewell.core.arrays import Ints, SmallInts

Numbers = Ints
# Minimum length of a shared prefix in tokens; a shorter prefix saves too little.
_MIN_PREFIX = 8
_EXACT_EPOCHS = 1000


class TokenizedDocuments(Protocol):
    """Documents with token ids and labels, for example a split of a corpus."""

    def __len__(self) -> int: ...

    def arrays(self, index: int) -> tuple[SmallInts, SmallInts]:
        """Return the ids and labels of a document."""
        ...

    index: Any
    """`length` and `supervised` of every document, by name."""


def spread_evenly(total: int, limit: int | None) -> Ints:
    """Return up to `limit` evenly spaced indices, so that all sources are included: documents are sorted by source."""
    number = total if limit is None else min(limit, total)
    return np.unique(np.linspace(0, total - 1, number).round().astype(np.int64)) if number else np.zeros(0, np.int64)


@dataclass(frozen=True)
class Step:
    """The documents of one optimizer step."""

    number: int
    """The number of the step, counted from 0."""
    epoch: int
    documents: Numbers
    seen: float
    """Number of epochs completed after this step, with the fraction of the current epoch."""

    @cached_property
    def sha256(self) -> str:
        """Hash of the documents in order; it is the same in equal runs."""
        return hashlib.sha256(self.documents.astype("<i8").tobytes()).hexdigest()[:16]


@dataclass(frozen=True)
class DataOrder:
    """The order of the documents in a run, as a pure function of a few numbers."""

    lengths: Numbers
    seed: int
    corpus_sha256: str
    batch_tokens: int | None = None
    batch_documents: int | None = None
    num_replayed: int = 0
    """Number of replayed documents; they are the last ones, after those of the corpus."""
    num_drawn: int = 0
    """How many of them an epoch has."""

    @property
    def num_rows(self) -> int:
        """The documents of the corpus."""
        return len(self.lengths) - self.num_replayed

    def permutation(self, epoch: int) -> Numbers:
        """Return the order of all documents in an epoch, and of the replayed ones that are drawn for it."""
        key = hashlib.sha256(f"{self.seed}/{epoch}/{self.corpus_sha256}".encode()).digest()
        chance = np.random.Generator(np.random.PCG64(int.from_bytes(key[:16], "little")))
        if not self.num_replayed:
            return chance.permutation(self.num_rows)
        rounds = [chance.permutation(self.num_replayed) for _ in range(-(-self.num_drawn // self.num_replayed))]
        drawn = self.num_rows + np.concatenate(rounds)[: self.num_drawn]
        return chance.permutation(np.concatenate([np.arange(self.num_rows), drawn]))

    def steps_of_epoch(self, epoch: int) -> list[Numbers]:
        """Split an epoch into steps. The last step may be short, and a document larger than a step is a step alone."""
        order = self.permutation(epoch)
        if self.batch_documents is not None:
            return [order[at : at + self.batch_documents] for at in range(0, len(order), self.batch_documents)]
        assert self.batch_tokens is not None
        return [order[a:b] for a, b in _next_fit(self.lengths[order], self.batch_tokens)]

    def num_steps(self, epochs: float) -> int:
        """Return the number of steps in `epochs`; for a partial epoch, count the steps that begin in it."""
        whole, part = int(epochs), epochs - int(epochs)
        total = self._begin(whole)
        if part > 0:
            begins = np.cumsum([0] + [len(step) for step in self.steps_of_epoch(whole)])[:-1]
            total += int(np.sum(begins < part * len(self.permutation(whole))))
        return max(1, total)

    def epochs_after(self, num_steps: int) -> float:
        """Return the number of epochs in `num_steps`; beyond 1,000 epochs, estimate it from the first 1,000."""
        if any(self._begin(epoch) >= num_steps for epoch in range(1, _EXACT_EPOCHS + 1)):
            return self.step(num_steps - 1).seen
        return num_steps * _EXACT_EPOCHS / self._begin(_EXACT_EPOCHS)

    def step(self, number: int) -> Step:
        """Return the documents of a step, counted from 0 over all epochs."""
        begins = self._begins
        while begins[-1] <= number:
            self._begin(len(begins))
        epoch = bisect_right(begins, number) - 1
        steps = self._cut(epoch)
        index = number - begins[epoch]
        done = sum(len(step) for step in steps[: index + 1])
        return Step(number, epoch, steps[index], epoch + done / sum(map(len, steps)))

    def _begin(self, epoch: int) -> int:
        while len(self._begins) <= epoch:
            last = len(self._begins) - 1
            self._begins.append(self._begins[last] + len(self._cut(last)))
        return self._begins[epoch]

    @cached_property
    def _begins(self) -> list[int]:
        return [0]

    @cached_property
    def _cut(self) -> Callable[[int], list[Numbers]]:
        """The steps of an epoch. Only the last epoch is cached, so that memory does not grow."""
        return lru_cache(maxsize=1)(self.steps_of_epoch)


def _next_fit(lengths: Numbers, budget: int) -> list[tuple[int, int]]:
    """Split documents, in order, before each document that would exceed the budget."""
    ends = np.cumsum(lengths)
    cuts: list[tuple[int, int]] = []
    begin = 0
    while begin < len(lengths):
        last_end = budget + (int(ends[begin - 1]) if begin else 0)
        end = max(begin + 1, int(np.searchsorted(ends, last_end, side="right")))
        cuts.append((begin, end))
        begin = end
    return cuts


def micro_batches(documents: Numbers, lengths: Numbers, budget: int, *, most: int | None = None) -> list[Numbers]:
    """Split a step into micro-batches of at most `budget` tokens and `most` documents, longest first."""
    # Sorting makes documents of equal length adjacent, as attention requires; sums do not depend on the order.
    order = documents[np.lexsort((documents, -lengths[documents]))]
    groups: list[list[int]] = []
    free: list[int] = []
    for document in order.tolist():
        size = int(lengths[document])
        at = next(
            (i for i, tokens in enumerate(free) if tokens >= size and (most is None or len(groups[i]) < most)),
            len(groups),
        )
        if at == len(groups):
            groups.append([])
            free.append(max(budget, size))
        groups[at].append(document)
        free[at] -= size
    return [np.asarray(group, dtype=np.int64) for group in groups]


@dataclass(frozen=True)
class MicroBatch:
    """Concatenated documents: the input of the model."""

    input_ids: Ints
    position_ids: Ints
    lengths: tuple[int, ...]
    """Lengths of the documents, followed by those of the padding documents."""
    rows: Ints
    """Positions whose next token is supervised."""
    targets: Ints
    """The supervised token that follows each of these positions."""
    documents: tuple[int, ...]
    num_tokens: int
    """Number of tokens without padding."""


@dataclass(frozen=True)
class SharedPrefix:
    """A batch in which the common prefix is computed once, followed by the rest of each document."""

    size: int
    lengths: tuple[int, ...]
    """Length of the prefix, followed by the length of the rest of each document."""
    computed: Ints
    """Indices of the batch's tokens that are computed."""
    token_index: Ints
    """For each token of the batch, its index among the computed tokens."""


@dataclass(frozen=True)
class FixedShape:
    """The fixed shape of a compiled model: every micro-batch is padded to it."""

    tokens: int
    documents: int
    longest: int

    def fits(self, batch: MicroBatch) -> bool:
        """Return True if a batch, including its padding documents, fits into this shape."""
        spare = self.tokens - batch.num_tokens
        return spare >= 0 and len(batch.lengths) + -(-spare // self.longest) <= self.documents


def make_batch(split: TokenizedDocuments, documents: Sequence[int] | Numbers) -> MicroBatch:
    """Read and concatenate documents; shift the labels by one within each document."""
    read = [split.arrays(int(document)) for document in documents]
    ids = np.concatenate([document_ids for document_ids, _ in read]).astype(np.int64)
    labels = np.concatenate([document_labels for _, document_labels in read])
    lengths = np.array([len(document_ids) for document_ids, _ in read])
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
    """Pad a batch to a fixed shape with additional documents that have no supervised tokens."""
    spare = shape.tokens - batch.num_tokens
    padding = [min(shape.longest, spare - at) for at in range(0, spare, shape.longest)]
    positions = [batch.position_ids, *(np.arange(length) for length in padding)]
    return replace(
        batch,
        input_ids=np.concatenate([batch.input_ids, np.zeros(spare, np.int64)]),
        position_ids=np.concatenate(positions).astype(np.int64),
        lengths=(*batch.lengths, *padding),
    )


def share_prefix(batch: MicroBatch, *, longest: int) -> SharedPrefix | None:
    """Return the batch with its common prefix computed once, or None if that saves almost nothing.

    The hidden state of a token depends only on earlier tokens of its document, so it is equal in all documents. If a
    document has more than `longest` tokens after the prefix, the prefix is only a small part of it.
    """
    if len(batch.lengths) < 2:
        return None
    starts = np.cumsum((0, *batch.lengths[:-1]))
    # At least one token of every document must remain after the prefix.
    most = min(batch.lengths) - 1
    heads = batch.input_ids[starts[:, None] + np.arange(most)]
    differing = np.flatnonzero((heads != heads[0]).any(0))
    size = int(differing[0]) if len(differing) else most
    if size < _MIN_PREFIX or max(batch.lengths) - size > longest:
        return None
    is_computed = np.ones(len(batch.input_ids), bool)
    is_computed[(starts[1:, None] + np.arange(size)).ravel()] = False
    token_index = np.cumsum(is_computed) - 1
    token_index[(starts[1:, None] + np.arange(size)).ravel()] = np.tile(np.arange(size), len(starts) - 1)
    return SharedPrefix(
        size, (size, *(length - size for length in batch.lengths)), np.flatnonzero(is_computed), token_index
    )


def cumulative_lengths(batch: MicroBatch, num_documents: int | None = None) -> SmallInts:
    """Return the cumulative lengths of the documents, padded with empty documents up to a fixed number."""
    ends = np.cumsum((0, *batch.lengths), dtype=np.int32)
    spare = 0 if num_documents is None else num_documents + 1 - len(ends)
    return np.concatenate([ends, np.full(spare, ends[-1], np.int32)])
