"""Check before the first step that packed documents do not attend to each other (no cross-contamination).

The logits of packed documents are compared with the logits of each document alone, and our attention is compared with
transformers' attention. If possible, one document is longer than the model's sliding window.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tunewell.core.errors import UserError
from tunewell.data.batches import MicroBatch, TokenizedDocuments, make_batch
from tunewell.models.attention import stock_attention
from tunewell.training.step import TrainableModel

# Relative logit difference: about 1e-6 from fp32 rounding, 1e-2 from 16-bit rounding, and 1 from a leak.
_BOUNDS = {"fp32": 1e-4, "bf16": 6e-2, "fp16": 2e-2}
_NUM_DOCUMENTS = 5
_ENDS = 32
# Documents are truncated to this length for the check, unless the sliding window needs a longer one.
_MOST_TOKENS = 1024


@dataclass(frozen=True)
class PackingCheck:
    """The largest relative logit differences: packed against alone, and our attention against transformers'."""

    packed_from_alone: float
    alone_from_stock: float
    num_documents: int
    longest: int


def probe_leaks(learner: TrainableModel, documents: TokenizedDocuments) -> PackingCheck:
    """Compare packed with single documents, and our attention with transformers'. Raise UserError if they differ."""
    learner.model.eval()
    parts = _parts(learner, documents)
    joined = _batch(
        np.concatenate([part.input_ids for part in parts]),
        np.concatenate([part.position_ids for part in parts]),
        tuple(part.num_tokens for part in parts),
    )
    bound = _BOUNDS[learner.precision]
    with torch.no_grad():
        try:
            together = learner.hidden(joined)[: joined.num_tokens]
            packed = [_logits(learner, own) for own in together.split(joined.lengths)]
            alone = [_logits(learner, learner.hidden(part)[: part.num_tokens]) for part in parts]
        except (NotImplementedError, TypeError) as error:
            raise UserError(
                f"documents cannot be packed for this model (`{learner.model.config.model_type}`): {error}",
                fix="choose another model; nothing was trained",
            ) from error
        with stock_attention(learner.model):
            stock = [_stock_logits(learner, part) for part in parts]
    probe = PackingCheck(
        packed_from_alone=max(distance(a, b) for a, b in zip(packed, alone, strict=True)),
        alone_from_stock=max(distance(a, b) for a, b in zip(alone, stock, strict=True)),
        num_documents=len(parts),
        longest=max(part.num_tokens for part in parts),
    )
    for value, what in (
        (probe.packed_from_alone, "packed rows influence each other"),
        (probe.alone_from_stock, "our attention differs from transformers'"),
    ):
        if not value <= bound:
            raise UserError(
                f"{what}: logits differ by {value:.1e}; rounding explains at most {bound:.0e}",
                where=f"`{learner.model.config.model_type}` in {learner.precision} on {learner.device}",
                fix="set `train.attention` to the other value, or report this model; nothing was trained",
            )
    return probe


def _parts(learner: TrainableModel, documents: TokenizedDocuments) -> list[MicroBatch]:
    """Return the documents to check: the longest, some shorter ones and, if all are too short, a random long one."""
    lengths = documents.index["length"]
    order = np.argsort(lengths, kind="stable")
    middle = order[len(order) // 2 : len(order) // 2 + _NUM_DOCUMENTS - 3]
    chosen = list(
        dict.fromkeys([int(order[0]), *(int(x) for x in middle), int(order[-1]), int(order[len(order) // 3])])
    )
    window = getattr(learner.model.config, "sliding_window", None)
    is_limiting = window is not None and int(lengths[order[-1]]) > window
    most = max(_MOST_TOKENS, window + 16) if window is not None and is_limiting else _MOST_TOKENS
    whole = [make_batch(documents, [document]) for document in chosen]
    parts = [_batch(part.input_ids[:most], part.position_ids[:most], (min(part.num_tokens, most),)) for part in whole]
    needed = 64 if window is None else window + 16
    if max(part.num_tokens for part in parts) < needed <= most:
        vocabulary = learner.head_module.weight.shape[0]
        ids = np.random.default_rng(0).integers(0, vocabulary, needed)
        # The random document starts like the first one, so that a shared prefix is checked too.
        ids[: needed // 2] = np.resize(parts[0].input_ids, needed // 2)
        parts.insert(1, _batch(ids, np.arange(needed), (needed,)))
    return parts


def _batch(ids: np.ndarray, positions: np.ndarray, lengths: tuple[int, ...]) -> MicroBatch:
    """Return a micro-batch without supervised tokens."""
    none = np.zeros(0, np.int64)
    return MicroBatch(ids, positions, lengths, none, none, (), sum(lengths))


def _logits(learner: TrainableModel, hidden_TH: Tensor) -> Tensor:
    """Return the logits of the first and last tokens of a document. All logits would take gigabytes."""
    if len(hidden_TH) > 2 * _ENDS:
        hidden_TH = torch.cat([hidden_TH[:_ENDS], hidden_TH[-_ENDS:]])
    return learner.head_module(hidden_TH.to(learner.head_module.weight.dtype)).float()


def _stock_logits(learner: TrainableModel, part: MicroBatch) -> Tensor:
    ids = torch.from_numpy(part.input_ids)[None].to(learner.device)
    with learner.autocast():
        return _logits(learner, learner.body(input_ids=ids, use_cache=False).last_hidden_state[0])


def distance(a: Tensor, b: Tensor) -> float:
    """Return the relative difference of two tensors."""
    return float((a - b).norm() / b.norm().clamp_min(1e-12))
