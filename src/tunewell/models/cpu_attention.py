"""Causal attention for the CPU, in blocks of queries. It is faster than torch's kernel up to 512 tokens.

    keys       p p | a a a a b b b b       the shared prefix, then a document's own tokens
    block a        | x . . .               a block of queries uses only the keys up to its own end;
    block b        | x x x x x . . .       only the last square needs a mask

With few keys, the attention weights are saved for the backward pass. With a long prefix they are recomputed, because
they would take more memory than all other activations.

Shapes: T tokens, K keys (with the prefix repeated for each document), H query heads, G key and value heads, D head
size, B documents times heads, L queries of a block.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

Runs = tuple[tuple[int, int], ...]
MAX_LENGTH = 512
"""Above this length torch's kernel is faster. The shared prefix does not count."""
_BLOCK = 192
# With 512 keys, the saved weights add about a quarter to the memory of the other activations.
_MAX_SAVED_KEYS = 512
_MAX_BLOCK_BYTES = 64 * 2**20


def causal_attention(q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, *, runs: Runs, prefix: int, scale: float) -> Tensor:
    """Attend within documents in fp32 and return [T, H, D]. With a prefix, the first run is the shared prefix."""
    out_THD = _CausalProducts.apply(q_HTD, k_GTD, v_GTD, _make_layout(runs, prefix), scale)
    assert isinstance(out_THD, Tensor)
    return out_THD


@dataclass(frozen=True)
class _Run:
    """Consecutive documents of one length."""

    first_token: int
    first_key: int
    """Index of the first key, in keys that repeat the prefix before each document."""
    number: int
    length: int
    num_keys: int

    def of_queries(self, x_HTD: Tensor) -> Tensor:
        """Return the queries of the run as [number * heads, length, D]. A single document is not copied."""
        return self._cut(x_HTD, self.first_token, self.length)

    def of_keys(self, x_HKD: Tensor) -> Tensor:
        """Return the keys of the run as [number * heads, keys, D]."""
        return self._cut(x_HKD, self.first_key, self.num_keys)

    def _cut(self, x_HTD: Tensor, start: int, length: int) -> Tensor:
        x_HTD = x_HTD[:, start : start + self.number * length]
        return x_HTD if self.number == 1 else x_HTD.unflatten(1, (-1, length)).transpose(0, 1).flatten(0, 1)

    def blocks(self, heads: int) -> Iterator[tuple[slice, slice]]:
        """Yield blocks of queries of about equal size, in reverse order, each with the keys it attends to."""
        most = min(_BLOCK, max(16, _MAX_BLOCK_BYTES // (4 * self.number * heads * self.num_keys)))
        size = -(-self.length // -(-self.length // most))
        for start in reversed(range(0, self.length, size)):
            end = min(self.length, start + size)
            yield slice(start, end), slice(0, self.num_keys - self.length + end)

    def put(self, into_THD: Tensor, rows: slice, x_BLD: Tensor) -> None:
        """Write some rows of every document to the output."""
        end = self.first_token + self.number * self.length
        target = into_THD[self.first_token : end].unflatten(0, (self.number, self.length))
        target[:, rows] = x_BLD.unflatten(0, (self.number, -1)).transpose(1, 2)


@dataclass(frozen=True)
class _Layout:
    runs: tuple[_Run, ...]
    prefix: int

    @cached_property
    def key_tokens(self) -> Tensor:
        """The token index of each key."""
        prefix = torch.arange(self.prefix, device="cpu")
        parts = []
        for run in self.runs:
            own = run.first_token + torch.arange(run.number * run.length, device="cpu").view(run.number, run.length)
            parts.append(torch.cat([prefix[: run.num_keys - run.length].expand(run.number, -1), own], 1).flatten())
        return torch.cat(parts)

    def keys(self, x_GTD: Tensor, heads: int) -> Tensor:
        """Return the keys of each query head as [H, K, D], with the prefix before every document's own keys."""
        if self.prefix:
            x_GTD = x_GTD.index_select(1, self.key_tokens)
        groups, num_keys, size = x_GTD.shape
        return x_GTD[:, None].expand(groups, heads // groups, num_keys, size).reshape(heads, num_keys, size)

    def sum_grads(self, d_HKD: Tensor, like_GTD: Tensor) -> Tensor:
        """Sum the gradients of keys that several heads or documents share."""
        groups, tokens, size = like_GTD.shape
        d_GKD = d_HKD.view(groups, -1, *d_HKD.shape[1:]).sum(1) if len(d_HKD) > groups else d_HKD
        if not self.prefix:
            return d_GKD
        return d_GKD.new_zeros(groups, tokens, size).index_add_(1, self.key_tokens, d_GKD)


@lru_cache(maxsize=64)
def _make_layout(runs: Runs, prefix: int) -> _Layout:
    placed: list[_Run] = []
    token = key = 0
    for number, length in runs:
        placed.append(_Run(token, key, number, length, length + (prefix if token else 0)))
        token, key = token + number * length, key + number * placed[-1].num_keys
    return _Layout(tuple(placed), prefix)


class _CausalProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, layout: _Layout, scale: float) -> Tensor:
        heads, tokens, _ = q_HTD.shape
        # Transposed in memory, not as a view, which makes products of this size a third faster.
        kt_HDK, v_HKD = _transposed(layout.keys(k_GTD, heads)), layout.keys(v_GTD, heads)
        out_THD, saved = q_HTD.new_empty(tokens, heads, v_GTD.shape[2]), []
        for run in layout.runs:
            q, kt, v = run.of_queries(q_HTD), run.of_keys(kt_HDK.transpose(1, 2)).transpose(1, 2), run.of_keys(v_HKD)
            for rows, keys in run.blocks(heads):
                probs = _attention_probs(q[:, rows], kt[:, :, keys], scale)
                run.put(out_THD, rows, torch.bmm(probs, v[:, keys]))
                if run.num_keys <= _MAX_SAVED_KEYS:
                    saved.append(probs)
        ctx.save_for_backward(q_HTD, k_GTD, v_GTD, *saved)
        ctx.layout, ctx.scale = layout, scale
        return out_THD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy_HTD = grads[0].transpose(0, 1)
        q_HTD, k_GTD, v_GTD, *saved = ctx.saved_tensors
        layout, scale, heads, zero = ctx.layout, ctx.scale, len(q_HTD), q_HTD.new_zeros(())
        k_HKD, v_HKD = layout.keys(k_GTD, heads), layout.keys(v_GTD, heads)
        vt_HDK = _transposed(v_HKD)
        dq_THD = torch.empty_like(q_HTD.transpose(0, 1))
        dk_HKD, dv_HKD = torch.empty_like(k_HKD), torch.empty_like(v_HKD)
        for run in layout.runs:
            q, k, dy = run.of_queries(q_HTD), run.of_keys(k_HKD), run.of_queries(dy_HTD)
            vt = run.of_keys(vt_HDK.transpose(1, 2)).transpose(1, 2)
            dk = dv = zero
            for rows, keys in run.blocks(heads):
                is_saved = run.num_keys <= _MAX_SAVED_KEYS
                probs = saved.pop(0) if is_saved else _attention_probs(q[:, rows], k[:, keys].transpose(1, 2), scale)
                d_probs = torch.bmm(dy[:, rows], vt[:, :, keys])
                d_scores = torch.ops.aten._softmax_backward_data(d_probs, probs, -1, probs.dtype)
                run.put(dq_THD, rows, torch.baddbmm(zero, d_scores, k[:, keys], beta=0, alpha=scale))
                more_k = torch.baddbmm(zero, d_scores.transpose(1, 2), q[:, rows], beta=0, alpha=scale)
                more_v = torch.bmm(probs.transpose(1, 2), dy[:, rows])
                if dk is zero:
                    # The last block is processed first and attends to all keys.
                    dk, dv = more_k, more_v
                else:
                    # Added separately, because a product into part of a matrix runs head by head.
                    dk[:, keys].add_(more_k)
                    dv[:, keys].add_(more_v)
            for into, part in ((dk_HKD, dk), (dv_HKD, dv)):
                target = into[:, run.first_key : run.first_key + run.number * run.num_keys]
                target.unflatten(1, (run.number, -1)).copy_(part.unflatten(0, (run.number, -1)).transpose(0, 1))
        return dq_THD.transpose(0, 1), layout.sum_grads(dk_HKD, k_GTD), layout.sum_grads(dv_HKD, v_GTD), None, None


def _transposed(x_HKD: Tensor) -> Tensor:
    return x_HKD.transpose(1, 2).contiguous()


def _attention_probs(q_BLD: Tensor, kt_BDK: Tensor, scale: float) -> Tensor:
    size = q_BLD.shape[1]
    scores = torch.baddbmm(q_BLD.new_zeros(()), q_BLD, kt_BDK, beta=0, alpha=scale)
    scores[:, :, -size:].add_(_causal_mask()[:size, :size])
    return torch.softmax(scores, -1)


@lru_cache(maxsize=1)
def _causal_mask() -> Tensor:
    """Return the additive causal mask: minus infinity where a key is after the query, otherwise zero."""
    return torch.full((_BLOCK, _BLOCK), float("-inf"), dtype=torch.float32, device="cpu").triu_(1)
