"""Check before the first step that packed documents do not attend to each other (no cross-contamination).

The logits of packed documents are compared with the logits of each document alone, and our attention is compared with
transformers' attention. If possible, one document is longer than the model's sliding window.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tunewell.core.errors import UserError
from tunewell.data.batches import MicroBatch, TokenizedDocuments
from tunewell.models.attention import stock_attention
from tunewell.training.step import TrainableModel

# Relative logit difference: about 1e-6 from fp32 rounding, 1e-2 from 16-bit rounding, and 1 from a leak.
_BOUNDS = {"fp32": 1e-4, "bf16": 6e-2, "fp16": 2e-2}
_NUM_DOCUMENTS = 5
_ENDS = 32
_MIN_TOKENS = 64
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
    chosen = _choose(learner, documents)
    with torch.no_grad():
        try:
            packed = [_logits(learner, own) for own in _hidden(learner, chosen).split([len(ids) for ids in chosen])]
            alone = [_logits(learner, _hidden(learner, [ids])) for ids in chosen]
        except (NotImplementedError, TypeError) as error:
            raise UserError(
                f"documents cannot be packed for this model (`{learner.model.config.model_type}`): {error}",
                fix="choose another model; nothing was trained",
            ) from error
        with stock_attention(learner.model):
            stock = [_stock_logits(learner, ids) for ids in chosen]
    check = PackingCheck(
        packed_from_alone=max(map(distance, packed, alone)),
        alone_from_stock=max(map(distance, alone, stock)),
        num_documents=len(chosen),
        longest=max(map(len, chosen)),
    )
    bound = _BOUNDS[learner.precision]
    for value, what in (
        (check.packed_from_alone, "packed rows influence each other"),
        (check.alone_from_stock, "our attention differs from transformers'"),
    ):
        if not value <= bound:
            raise UserError(
                f"{what}: logits differ by {value:.1e}; rounding explains at most {bound:.0e}",
                where=f"`{learner.model.config.model_type}` in {learner.precision} on {learner.device}",
                fix="set `train.attention` to the other value, or report this model; nothing was trained",
            )
    return check


def _choose(learner: TrainableModel, documents: TokenizedDocuments) -> list[np.ndarray]:
    """Return the ids to check: of the longest document, some shorter ones and, if all are too short, random ones."""
    lengths = documents.index["length"]
    order = np.argsort(lengths, kind="stable")
    middle = order[len(order) // 2 : len(order) // 2 + _NUM_DOCUMENTS - 3]
    chosen = dict.fromkeys(map(int, (order[0], *middle, order[-1], order[len(order) // 3])))
    window = getattr(learner.model.config, "sliding_window", None) or 0
    needed = window + 16 if window else _MIN_TOKENS
    most = max(_MOST_TOKENS, needed) if int(lengths[order[-1]]) > window else _MOST_TOKENS
    found = [documents.arrays(document)[0][:most].astype(np.int64) for document in chosen]
    if max(map(len, found)) < needed <= most:
        ids = np.random.default_rng(0).integers(0, learner.head_module.weight.shape[0], needed)
        # The random document starts like the first one, so that a shared prefix is checked too.
        ids[: needed // 2] = np.resize(found[0], needed // 2)
        found.insert(1, ids)
    return found


def _hidden(learner: TrainableModel, documents: list[np.ndarray]) -> Tensor:
    """Return the hidden states of packed documents. None of their tokens are supervised."""
    lengths, none = tuple(map(len, documents)), np.zeros(0, np.int64)
    positions = np.concatenate([np.arange(length) for length in lengths])
    batch = MicroBatch(np.concatenate(documents), positions, lengths, none, none, (), len(positions))
    return learner.hidden(batch)[: len(positions)]


def _logits(learner: TrainableModel, hidden_TH: Tensor) -> Tensor:
    """Return the logits of the first and last tokens of a document. All logits would take gigabytes."""
    if len(hidden_TH) > 2 * _ENDS:
        hidden_TH = torch.cat([hidden_TH[:_ENDS], hidden_TH[-_ENDS:]])
    return learner.head_module(hidden_TH.to(learner.head_module.weight.dtype)).float()


def _stock_logits(learner: TrainableModel, ids: np.ndarray) -> Tensor:
    with learner.autocast():
        out = learner.body(input_ids=torch.from_numpy(ids)[None].to(learner.device), use_cache=False)
        return _logits(learner, out.last_hidden_state[0])


def distance(a: Tensor, b: Tensor) -> float:
    """Return the relative difference of two tensors."""
    return float((a - b).norm() / b.norm().clamp_min(1e-12))
