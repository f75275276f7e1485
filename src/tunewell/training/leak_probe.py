"""Check before the first step that documents packed into one row do not influence each other (cross-contamination).

Exactly, in both passes:

    backward   the gradient of every second document with respect to the embeddings of the others is zero
    forward    the hidden states of every second document are the same, to the bit, with other tokens in the others

And to rounding: the logits of packed documents are those of each document alone, and our attention is transformers'
attention. If possible, one document is longer than the model's sliding window.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tunewell.core.arrays import Ints
from tunewell.core.errors import UserError
from tunewell.data.batches import MicroBatch, TokenizedDocuments, share_prefix
from tunewell.machine.out_of_memory import is_out_of_memory
from tunewell.models.attention import is_packed, stock_attention
from tunewell.models.cpu_attention import MAX_LENGTH
from tunewell.training.step import TrainableModel

# Relative logit difference: about 1e-6 from fp32 rounding, 1e-2 from 16-bit rounding, and 1 from a leak.
_BOUNDS = {"fp32": 1e-4, "bf16": 6e-2, "fp16": 2e-2}
_NUM_DOCUMENTS = 5
_ENDS = 32
_MIN_TOKENS = 64
# Documents are truncated to this length for the check, unless the sliding window needs a longer one.
_MOST_TOKENS = 1024
_EXACT_TOKENS = (130, 40)
"""Tokens of the first document, and of the others, in the exact check: more than a block of the GPU kernels."""


class PackingFault(UserError):
    """Documents packed into one row influence each other, or cannot be packed."""


@dataclass(frozen=True)
class PackingCheck:
    """The differences that were found. The first two are exactly zero, the others only rounding."""

    gradient: float
    """The largest gradient of a document with respect to the embeddings of another one."""
    exchange: float
    """The largest relative change of a document when the others change; rounding if experts are routed."""
    packed_from_alone: float
    """The largest relative difference of logits: packed against alone."""
    alone_from_stock: float
    """The largest relative difference of logits: our attention against transformers'."""
    num_documents: int
    longest: int


def probe_leaks(learner: TrainableModel, documents: TokenizedDocuments) -> PackingCheck:
    """Check that packed documents are what they are alone. Raise PackingFault if they are not."""
    learner.model.eval()
    chosen = _choose(learner, documents)
    try:
        gradient, exchange = _isolation(learner, [ids[: _EXACT_TOKENS[at > 0]] for at, ids in enumerate(chosen)])
        with torch.no_grad():
            packed = [_logits(learner, own) for own in _hidden(learner, chosen).split([len(ids) for ids in chosen])]
            alone = [_logits(learner, _hidden(learner, [ids])) for ids in chosen]
    except Exception as error:  # transformers' layers fail in many ways on what they were not written for
        if is_out_of_memory(error):
            raise
        kind = learner.model.config.model_type
        what = f"documents cannot be packed for this model (`{kind}`)"
        if not is_packed(learner.model):
            what = f"transformers cannot compute `{kind}` in {learner.precision} on {learner.device}"
        raise PackingFault(f"{what}: {error}", fix="report this model; nothing was trained") from error
    with torch.no_grad(), stock_attention(learner.model):
        stock = [_stock_logits(learner, ids) for ids in chosen]
    # In 16 bits, rounding sends a few tokens to other experts.
    distance_of = _median_distance if _has_experts(learner) and learner.precision != "fp32" else distance
    check = PackingCheck(
        gradient,
        exchange,
        packed_from_alone=max(map(distance, packed, alone)),
        alone_from_stock=max(map(distance_of, alone, stock)),
        num_documents=len(chosen),
        longest=max(map(len, chosen)),
    )
    _require_no_fault(learner, check)
    return check


def _require_no_fault(learner: TrainableModel, check: PackingCheck) -> None:
    bound = _BOUNDS[learner.precision]
    # The products of an expert have another shape if it is chosen by other tokens.
    rounding = bound if _has_experts(learner) else 0.0
    for value, most, what in (
        (check.gradient, 0.0, "packed rows influence each other: a gradient crosses from one to another"),
        (check.exchange, rounding, "packed rows influence each other: one changes with another"),
        (check.packed_from_alone, bound, "packed rows influence each other: logits differ"),
        (check.alone_from_stock, 3 * rounding or bound, "our attention differs from transformers': logits differ"),
    ):
        if not value <= most:
            allowed = f"rounding explains at most {most:.0e}" if most else "it must be exactly zero"
            raise PackingFault(
                f"{what} by {value:.1e}; {allowed}",
                where=f"`{learner.model.config.model_type}` in {learner.precision} on {learner.device}",
                fix="set `train.attention` to the other value, or report this model; nothing was trained",
            )


def _isolation(learner: TrainableModel, documents: list[np.ndarray]) -> tuple[float, float]:
    """Return the largest gradient that crosses from a document to another, and the largest change by exchange."""
    if len(documents) < 2:
        documents = [documents[0], np.roll(documents[0], 1)]
    batch, gradient = _batch(documents), 0.0
    owner_T = np.repeat(np.arange(len(documents)), batch.lengths) % 2
    if is_packed(learner.model):  # otherwise no document shares a row with another
        devices = [learner.device] if learner.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            gradient = _crossing_gradient(learner, batch, owner_T)
    with torch.no_grad():
        before_TH, exchange = learner.hidden(batch), 0.0
        for parity in (0, 1):
            others = torch.from_numpy(owner_T != parity).to(learner.device)
            after_TH = learner.hidden(_exchanged(learner, batch, owner_T == parity))
            exchange = max(exchange, distance(after_TH[others], before_TH[others]))
    return gradient, exchange


def _crossing_gradient(learner: TrainableModel, batch: MicroBatch, owner_T: Ints) -> float:
    """Return the largest gradient of the even documents with respect to the odd ones' embeddings, and vice versa."""
    learner.model.train()
    try:
        with _leaf_embeddings(learner) as leaves:
            hidden_TH = learner.hidden(batch)
        shared = share_prefix(batch, longest=MAX_LENGTH)
        owner_C = owner_T
        if shared is not None and sum(leaf[..., 0].numel() for leaf in leaves) < len(owner_T):
            owner_C = owner_T[shared.computed]
            owner_C[: shared.size] = -1  # the shared prefix belongs to all
        weights_H = torch.linspace(-1, 1, hidden_TH.shape[1], device=hidden_TH.device)
        found = 0.0
        for parity in (0, 1):
            own = torch.from_numpy(np.flatnonzero(owner_T == parity)).to(learner.device)
            total = (hidden_TH[own].float() @ weights_H).sum()
            grads = torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)
            pairs = zip(grads, leaves, strict=True)
            grad_CH = torch.cat([(torch.zeros_like(x) if g is None else g).flatten(0, -2) for g, x in pairs])
            if not bool(grad_CH[torch.from_numpy(owner_C == parity)].any()):
                raise NotImplementedError("its gradient does not reach the embeddings")
            found = max(found, float(grad_CH[torch.from_numpy(owner_C == 1 - parity)].abs().amax()))
        return found
    finally:
        learner.model.eval()


@contextmanager
def _leaf_embeddings(learner: TrainableModel) -> Iterator[list[Tensor]]:
    """Make the embeddings of the next forward passes leaves of the graph, and collect them, inside a `with` block."""
    leaves: list[Tensor] = []

    def capture(module: Any, args: Any, output: Tensor) -> Tensor:
        leaves.append(output.detach().requires_grad_())
        return leaves[-1].clone()  # some models scale their embeddings in place

    embedding: Any = learner.model.get_input_embeddings()
    handle = embedding.register_forward_hook(capture)
    try:
        yield leaves
    finally:
        handle.remove()


def _exchanged(learner: TrainableModel, batch: MicroBatch, chosen_T: np.ndarray) -> MicroBatch:
    """Return a batch with other tokens in the chosen places, but with the same shared prefix."""
    num_tokens = learner.head_module.weight.shape[0]
    shared = share_prefix(batch, longest=MAX_LENGTH)
    size = 0 if shared is None else shared.size
    for offset in range(1, num_tokens):
        ids = batch.input_ids.copy()
        chosen = chosen_T & (batch.position_ids >= size)
        ids[chosen] = (ids[chosen] + offset) % num_tokens
        changed = MicroBatch(ids, batch.position_ids, batch.lengths, batch.rows, batch.targets, (), batch.num_tokens)
        again = share_prefix(changed, longest=MAX_LENGTH)
        if (0 if again is None else again.size) == size:
            return changed
    return batch


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
    """Return the hidden states of packed documents."""
    return learner.hidden(_batch(documents))[: sum(map(len, documents))]


def _batch(documents: Sequence[np.ndarray]) -> MicroBatch:
    """Return a batch of documents, none of whose tokens are supervised."""
    lengths, none = tuple(map(len, documents)), np.zeros(0, np.int64)
    positions = np.concatenate([np.arange(length) for length in lengths])
    return MicroBatch(np.concatenate(documents), positions, lengths, none, none, (), len(positions))


def _logits(learner: TrainableModel, hidden_TH: Tensor) -> Tensor:
    """Return the logits of the first and last tokens of a document. All logits would take gigabytes."""
    if len(hidden_TH) > 2 * _ENDS:
        hidden_TH = torch.cat([hidden_TH[:_ENDS], hidden_TH[-_ENDS:]])
    return learner.head_module(hidden_TH.to(learner.head_module.weight.dtype)).float()


def _stock_logits(learner: TrainableModel, ids: np.ndarray) -> Tensor:
    with learner.autocast():
        out = learner.body(input_ids=torch.from_numpy(ids)[None].to(learner.device), use_cache=False)
        return _logits(learner, out.last_hidden_state[0])


def _has_experts(learner: TrainableModel) -> bool:
    return any(name.endswith("experts") for name, _ in learner.model.named_modules())


def _median_distance(a_TV: Tensor, b_TV: Tensor) -> float:
    """Return the median over the tokens of the relative difference of two tensors."""
    return float(((a_TV - b_TV).norm(dim=-1) / b_TV.norm(dim=-1).clamp_min(1e-12)).median())


def distance(a: Tensor, b: Tensor) -> float:
    """Return the relative difference of two tensors."""
    return float((a - b).norm() / b.norm().clamp_min(1e-12))
