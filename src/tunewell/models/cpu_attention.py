"""Causal attention on a CPU as plain products over blocks of queries: faster than torch's kernel up to 512 tokens.

    keys       o o | a a a a b b b b       the opening that documents share, then a document's own tokens
    block a        | x . . .               a block of queries takes the keys up to its own end and nothing after them;
    block b        | x x x x x . . .       only in the last square is anything masked

The shares that each query gives to its keys are kept for the way back while keys are few, and computed again behind a
long opening: kept, they would outgrow everything else.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

Runs = tuple[tuple[int, int], ...]
LONGEST = 512
"""Documents whose own part is longer are better left to torch's kernel."""
_BLOCK = 192
# Kept shares of a document with 512 keys take about a quarter of what its layers keep anyway.
_KEPT_KEYS = 512
_MOST_BLOCK_BYTES = 64 * 2**20


def causal_attention(q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, *, runs: Runs, opening: int, scale: float) -> Tensor:
    """Attend within documents laid end to end, in fp32; with an opening, the first run is what all others begin with.

    Gives [T, H, D].
    """
    out_THD = _CausalProducts.apply(q_HTD, k_GTD, v_GTD, _laid_out(runs, opening), scale)
    assert isinstance(out_THD, Tensor)
    return out_THD


@dataclass(frozen=True)
class _Run:
    """Documents of one length that follow each other."""

    at: int
    """Of their first token."""
    keys_at: int
    """Of their first key, where each document has the opening before its own keys."""
    number: int
    length: int
    num_keys: int

    def of_queries(self, x_HTD: Tensor) -> Tensor:
        """Give their own rows as [number * heads, length, D]; those of one document without copying."""
        return self._cut(x_HTD, self.at, self.length)

    def of_keys(self, x_HKD: Tensor) -> Tensor:
        """Give their keys' rows as [number * heads, keys, D]."""
        return self._cut(x_HKD, self.keys_at, self.num_keys)

    def _cut(self, x_HTD: Tensor, at: int, length: int) -> Tensor:
        x_HTD = x_HTD[:, at : at + self.number * length]
        return x_HTD if self.number == 1 else x_HTD.unflatten(1, (-1, length)).transpose(0, 1).flatten(0, 1)

    def blocks(self, heads: int) -> Iterator[tuple[slice, slice]]:
        """Cut the queries into blocks of about one size, from the last; give each with the keys it sees."""
        most = min(_BLOCK, max(16, _MOST_BLOCK_BYTES // (4 * self.number * heads * self.num_keys)))
        size = -(-self.length // -(-self.length // most))
        for at in reversed(range(0, self.length, size)):
            end = min(self.length, at + size)
            yield slice(at, end), slice(0, self.num_keys - self.length + end)

    def put(self, into_THD: Tensor, rows: slice, x_BLD: Tensor) -> None:
        """Write some rows of every document where they belong."""
        own = into_THD[self.at : self.at + self.number * self.length].unflatten(0, (self.number, self.length))
        own[:, rows] = x_BLD.unflatten(0, (self.number, -1)).transpose(1, 2)


@dataclass(frozen=True)
class _Layout:
    runs: tuple[_Run, ...]
    opening: int

    @cached_property
    def key_tokens(self) -> Tensor:
        """Give the token of each key."""
        opening = torch.arange(self.opening, device="cpu")
        parts = []
        for run in self.runs:
            own = torch.arange(run.at, run.at + run.number * run.length, device="cpu").view(run.number, run.length)
            parts.append(torch.cat([opening[: run.num_keys - run.length].expand(run.number, -1), own], 1).flatten())
        return torch.cat(parts)

    def keys(self, x_GTD: Tensor, heads: int) -> Tensor:
        """Give each query head its keys, the opening's before every document's own: [H, K, D]."""
        if self.opening:
            x_GTD = x_GTD.index_select(1, self.key_tokens)
        groups, num_keys, size = x_GTD.shape
        return x_GTD[:, None].expand(groups, heads // groups, num_keys, size).reshape(heads, num_keys, size)

    def back(self, d_HKD: Tensor, like_GTD: Tensor) -> Tensor:
        """Add gradients up where heads share a key, and documents an opening."""
        groups, tokens, size = like_GTD.shape
        d_GKD = d_HKD.view(groups, -1, *d_HKD.shape[1:]).sum(1) if len(d_HKD) > groups else d_HKD
        if not self.opening:
            return d_GKD
        return d_GKD.new_zeros(groups, tokens, size).index_add_(1, self.key_tokens, d_GKD)


@lru_cache(maxsize=64)
def _laid_out(runs: Runs, opening: int) -> _Layout:
    assert not opening or runs[0] == (1, opening)
    made: list[_Run] = []
    at = keys_at = 0
    for number, length in runs:
        made.append(_Run(at, keys_at, number, length, length + (opening if at else 0)))
        at, keys_at = at + number * length, keys_at + number * made[-1].num_keys
    return _Layout(tuple(made), opening)


class _CausalProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, layout: _Layout, scale: float) -> Tensor:
        heads, tokens, _ = q_HTD.shape
        # Turned in memory, not in name: products of this size take a third less time with it.
        kt_HDK, v_HKD = _turned(layout.keys(k_GTD, heads)), layout.keys(v_GTD, heads)
        out_THD, kept = q_HTD.new_empty(tokens, heads, v_GTD.shape[2]), []
        for run in layout.runs:
            q, kt, v = run.of_queries(q_HTD), run.of_keys(kt_HDK.transpose(1, 2)).transpose(1, 2), run.of_keys(v_HKD)
            for rows, keys in run.blocks(heads):
                shares = _shares(q[:, rows], kt[:, :, keys], scale)
                run.put(out_THD, rows, torch.bmm(shares, v[:, keys]))
                if run.num_keys <= _KEPT_KEYS:
                    kept.append(shares)
        ctx.save_for_backward(q_HTD, k_GTD, v_GTD, *kept)
        ctx.layout, ctx.scale = layout, scale
        return out_THD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy_HTD = grads[0].transpose(0, 1)
        q_HTD, k_GTD, v_GTD, *kept = ctx.saved_tensors
        layout, scale, heads, none = ctx.layout, ctx.scale, len(q_HTD), q_HTD.new_zeros(())
        k_HKD, v_HKD = layout.keys(k_GTD, heads), layout.keys(v_GTD, heads)
        vt_HDK = _turned(v_HKD)
        dq_THD = torch.empty_like(q_HTD.transpose(0, 1))
        dk_HKD, dv_HKD = torch.empty_like(k_HKD), torch.empty_like(v_HKD)
        for run in layout.runs:
            q, k, dy = run.of_queries(q_HTD), run.of_keys(k_HKD), run.of_queries(dy_HTD)
            vt = run.of_keys(vt_HDK.transpose(1, 2)).transpose(1, 2)
            dk = dv = none
            for rows, keys in run.blocks(heads):
                is_kept = run.num_keys <= _KEPT_KEYS
                shares = kept.pop(0) if is_kept else _shares(q[:, rows], k[:, keys].transpose(1, 2), scale)
                d_shares = torch.bmm(dy[:, rows], vt[:, :, keys])
                d_scores = torch.ops.aten._softmax_backward_data(d_shares, shares, -1, shares.dtype)
                run.put(dq_THD, rows, torch.baddbmm(none, d_scores, k[:, keys], beta=0, alpha=scale))
                more_k = torch.baddbmm(none, d_scores.transpose(1, 2), q[:, rows], beta=0, alpha=scale)
                more_v = torch.bmm(shares.transpose(1, 2), dy[:, rows])
                if dk is none:
                    # The last block comes first, and sees all keys.
                    dk, dv = more_k, more_v
                else:
                    # Added afterwards: into a part of a matrix the product itself goes one head after the other.
                    dk[:, keys].add_(more_k)
                    dv[:, keys].add_(more_v)
            for into, part in ((dk_HKD, dk), (dv_HKD, dv)):
                its = into[:, run.keys_at : run.keys_at + run.number * run.num_keys]
                its.unflatten(1, (run.number, -1)).copy_(part.unflatten(0, (run.number, -1)).transpose(0, 1))
        return dq_THD.transpose(0, 1), layout.back(dk_HKD, k_GTD), layout.back(dv_HKD, v_GTD), None, None


def _turned(x_HKD: Tensor) -> Tensor:
    return x_HKD.transpose(1, 2).contiguous()


def _shares(q_BLD: Tensor, kt_BDK: Tensor, scale: float) -> Tensor:
    size = q_BLD.shape[1]
    scores = torch.baddbmm(q_BLD.new_zeros(()), q_BLD, kt_BDK, beta=0, alpha=scale)
    scores[:, :, -size:].add_(_later()[:size, :size])
    return torch.softmax(scores, -1)


@lru_cache(maxsize=1)
def _later() -> Tensor:
    """Give minus infinity wherever a key comes after a query."""
    return torch.full((_BLOCK, _BLOCK), float("-inf"), dtype=torch.float32, device="cpu").triu_(1)
