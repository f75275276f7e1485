"""Prove, before the first step, that packed documents do not see each other and that our attention is the model's own.

Real documents are laid end to end and their logits compared with those of each document alone, by our attention and
by transformers' own. One of them is longer than any window the model has, where it can be.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tunewell.core.errors import UserError
from tunewell.data.batches import MicroBatch, TokenizedDocuments, make_batch
from tunewell.models.attention import stock_attention
from tunewell.training.step import TrainableModel

# Relative distance of logits: rounding of fp32 kernels is near 1e-6, of 16-bit ones near 1e-2; a leak is near 1.
_BOUNDS = {"fp32": 1e-4, "bf16": 6e-2, "fp16": 2e-2}
_NUM_DOCUMENTS = 5
_ENDS = 32
# A document longer than this is cut for the probe, unless it is the one that a window bites on.
_MOST_TOKENS = 1024


@dataclass(frozen=True)
class Probe:
    """How far packed logits lie from those of documents alone, and ours from transformers' own, at worst."""

    packed_from_alone: float
    alone_from_stock: float
    num_documents: int
    longest: int


def probe_leaks(learner: TrainableModel, documents: TokenizedDocuments) -> Probe:
    """Compare packed with alone and ours with stock; raise UserError where they differ."""
    learner.model.eval()
    parts = _parts(learner, documents)
    bound = _BOUNDS[learner.precision]
    with torch.no_grad():
        try:
            together = learner.hidden(_joined(parts))[: sum(part.num_tokens for part in parts)]
            packed = [_logits(learner, own) for own in together.split([part.num_tokens for part in parts])]
            alone = [_logits(learner, learner.hidden(part)[: part.num_tokens]) for part in parts]
        except (NotImplementedError, TypeError) as error:
            raise UserError(
                f"packed documents cannot be kept apart in this model (`{learner.model.config.model_type}`): {error}",
                fix="choose another model; nothing was trained",
            ) from error
        with stock_attention(learner.model):
            stock = [_stock_logits(learner, part) for part in parts]
    probe = Probe(
        packed_from_alone=max(_distance(a, b) for a, b in zip(packed, alone, strict=True)),
        alone_from_stock=max(_distance(a, b) for a, b in zip(alone, stock, strict=True)),
        num_documents=len(parts),
        longest=max(part.num_tokens for part in parts),
    )
    for value, what in (
        (probe.packed_from_alone, "a document packed with others gives other logits than alone"),
        (probe.alone_from_stock, "our attention gives other logits than transformers' own"),
    ):
        if not value <= bound:
            raise UserError(
                f"{what}: they differ by {value:.1e}, and rounding explains {bound:.0e}",
                where=f"`{learner.model.config.model_type}` in {learner.precision} on {learner.device}",
                fix="set `train.attention` to the other way, or report this model; nothing was trained",
            )
    return probe


def _parts(learner: TrainableModel, documents: TokenizedDocuments) -> list[MicroBatch]:
    """Take the longest document, short ones around it, and an invented one longer than any window."""
    lengths = documents.index["length"]
    order = np.argsort(lengths, kind="stable")
    middle = order[len(order) // 2 : len(order) // 2 + _NUM_DOCUMENTS - 3]
    chosen = list(
        dict.fromkeys([int(order[0]), *(int(x) for x in middle), int(order[-1]), int(order[len(order) // 3])])
    )
    window = getattr(learner.model.config, "sliding_window", None)
    bites = window is not None and int(lengths[order[-1]]) > window
    most = max(_MOST_TOKENS, window + 16) if window is not None and bites else _MOST_TOKENS
    parts = [_shortened(make_batch(documents, [document]), most) for document in chosen]
    wanted = 64 if window is None else window + 16
    if max(part.num_tokens for part in parts) < wanted <= most:
        vocabulary = learner.head_module.weight.shape[0]
        ids = np.random.default_rng(0).integers(0, vocabulary, wanted)
        # It begins as the others do, so that what is made of a shared opening is seen here too.
        ids[: wanted // 2] = np.resize(parts[0].input_ids, wanted // 2)
        none = np.zeros(0, np.int64)
        parts.insert(1, MicroBatch(ids, np.arange(wanted), (wanted,), none, none, (), wanted))
    return parts


def _shortened(part: MicroBatch, most: int) -> MicroBatch:
    size = min(part.num_tokens, most)
    none = np.zeros(0, np.int64)
    return MicroBatch(part.input_ids[:size], part.position_ids[:size], (size,), none, none, part.documents, size)


def _joined(parts: list[MicroBatch]) -> MicroBatch:
    none = np.zeros(0, np.int64)
    return MicroBatch(
        input_ids=np.concatenate([part.input_ids for part in parts]),
        position_ids=np.concatenate([part.position_ids for part in parts]),
        lengths=tuple(part.num_tokens for part in parts),
        rows=none,
        targets=none,
        documents=(),
        num_tokens=sum(part.num_tokens for part in parts),
    )


def _logits(learner: TrainableModel, hidden_TH: Tensor) -> Tensor:
    """Give the logits of a document's first and last tokens: all of them would be gigabytes for large vocabularies."""
    if len(hidden_TH) > 2 * _ENDS:
        hidden_TH = torch.cat([hidden_TH[:_ENDS], hidden_TH[-_ENDS:]])
    return learner.head_module(hidden_TH.to(learner.head_module.weight.dtype)).float()


def _stock_logits(learner: TrainableModel, part: MicroBatch) -> Tensor:
    ids = torch.from_numpy(part.input_ids)[None].to(learner.device)
    with learner.autocast():
        return _logits(learner, learner.body(input_ids=ids, use_cache=False).last_hidden_state[0])


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp_min(1e-12))
