"""Attention within packed documents as Triton kernels.

    tokens    a a a a b b c c c c c        one row of T tokens, in blocks of 64
    starts    0 0 0 0 4 4 6 6 6 6 6        where each token's document begins
    ends      4 4 4 4 6 6 11 ...           where it ends

torch's flash kernel starts one thread block per document, head and 128 positions of the longest document. With
documents of 200 tokens and one of 1,000, five of six thread blocks have no work. Here a block is 64 tokens of the row,
whatever documents they belong to: its keys begin at the start of the first document and end at the last query. The
backward pass has one kernel for queries and one for keys and values. Both sum in a fixed order, so results are
reproducible.

Shapes: T tokens, H query heads, G key and value heads, D head size; M and N are blocks of queries and of keys.
"""

# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2_E = math.log2(math.e)
_FORWARD: dict[str, int] = {"M": 64, "N": 64, "num_warps": 4, "num_stages": 2}
_QUERIES: dict[str, int] = {"M": 64, "N": 64, "num_warps": 4, "num_stages": 2}
_KEYS: dict[str, int] = {"M": 64, "N": 64, "num_warps": 4, "num_stages": 1}
"""Block sizes and launch settings of the three kernels, measured on an H200 (benchmarks/RESULTS.md)."""


@triton.jit
def _forward(
    q_ptr, k_ptr, v_ptr, start_ptr, out_ptr, lse_ptr, num_tokens, scale,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1)
    G: tl.constexpr = H // GROUP
    group = head // GROUP
    rows = block * M + tl.arange(0, M)
    columns = tl.arange(0, D)
    is_row = rows < num_tokens
    q = tl.load(q_ptr + rows[:, None] * (H * D) + head * D + columns[None, :], mask=is_row[:, None], other=0.0)
    start = tl.load(start_ptr + rows, mask=is_row, other=num_tokens)
    best = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    out = tl.zeros([M, D], tl.float32)
    first = tl.min(start, 0) // N * N
    for begin in range(first, tl.minimum((block + 1) * M, num_tokens), N):
        keys = begin + tl.arange(0, N)
        is_key = keys < num_tokens
        at = keys[:, None] * (G * D) + group * D + columns[None, :]
        k = tl.load(k_ptr + at, mask=is_key[:, None], other=0.0)
        v = tl.load(v_ptr + at, mask=is_key[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        is_seen = (keys[None, :] <= rows[:, None]) & (keys[None, :] >= start[:, None])
        scores = tl.where(is_seen, scores, -float("inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        # A row may have seen no key yet; 0 instead of its maximum avoids inf - inf.
        safe = tl.where(new_best == -float("inf"), 0.0, new_best)
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(best - safe)
        total = total * shrink + tl.sum(weights, 1)
        out = out * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        best = new_best
    total = tl.where(is_row, total, 1.0)
    tl.store(
        out_ptr + rows[:, None] * (H * D) + head * D + columns[None, :],
        (out / total[:, None]).to(out_ptr.dtype.element_ty),
        mask=is_row[:, None],
    )
    tl.store(lse_ptr + head * num_tokens + rows, best + tl.log2(total), mask=is_row)


@triton.jit
def _backward_queries(
    q_ptr, k_ptr, v_ptr, out_ptr, grad_ptr, lse_ptr, start_ptr, dq_ptr, delta_ptr, num_tokens, scale, softmax_scale,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1)
    G: tl.constexpr = H // GROUP
    group = head // GROUP
    rows = block * M + tl.arange(0, M)
    columns = tl.arange(0, D)
    is_row = rows < num_tokens
    at_rows = rows[:, None] * (H * D) + head * D + columns[None, :]
    q = tl.load(q_ptr + at_rows, mask=is_row[:, None], other=0.0)
    grad = tl.load(grad_ptr + at_rows, mask=is_row[:, None], other=0.0)
    out = tl.load(out_ptr + at_rows, mask=is_row[:, None], other=0.0)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    tl.store(delta_ptr + head * num_tokens + rows, delta, mask=is_row)
    lse = tl.load(lse_ptr + head * num_tokens + rows, mask=is_row, other=0.0)
    start = tl.load(start_ptr + rows, mask=is_row, other=num_tokens)
    dq = tl.zeros([M, D], tl.float32)
    first = tl.min(start, 0) // N * N
    for begin in range(first, tl.minimum((block + 1) * M, num_tokens), N):
        keys = begin + tl.arange(0, N)
        is_key = keys < num_tokens
        at = keys[:, None] * (G * D) + group * D + columns[None, :]
        k = tl.load(k_ptr + at, mask=is_key[:, None], other=0.0)
        v = tl.load(v_ptr + at, mask=is_key[:, None], other=0.0)
        is_seen = (keys[None, :] <= rows[:, None]) & (keys[None, :] >= start[:, None])
        scores = tl.dot(q, tl.trans(k)) * scale
        weights = tl.where(is_seen, tl.exp2(scores - lse[:, None]), 0.0)
        dweights = tl.dot(grad, tl.trans(v))
        dscores = weights * (dweights - delta[:, None])
        dq += tl.dot(dscores.to(k.dtype), k)
    tl.store(dq_ptr + at_rows, (dq * softmax_scale).to(dq_ptr.dtype.element_ty), mask=is_row[:, None])


@triton.jit
def _backward_keys(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, end_ptr, start_ptr, dk_ptr, dv_ptr, num_tokens, scale,
    softmax_scale, H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    block, group = tl.program_id(0), tl.program_id(1)
    G: tl.constexpr = H // GROUP
    keys = block * N + tl.arange(0, N)
    columns = tl.arange(0, D)
    is_key = keys < num_tokens
    at_keys = keys[:, None] * (G * D) + group * D + columns[None, :]
    k = tl.load(k_ptr + at_keys, mask=is_key[:, None], other=0.0)
    v = tl.load(v_ptr + at_keys, mask=is_key[:, None], other=0.0)
    last = tl.max(tl.load(end_ptr + keys, mask=is_key, other=0), 0)
    dk = tl.zeros([N, D], tl.float32)
    dv = tl.zeros([N, D], tl.float32)
    first = block * N // M * M
    for member in range(GROUP):
        head = group * GROUP + member
        for begin in range(first, last, M):
            rows = begin + tl.arange(0, M)
            is_row = rows < num_tokens
            at = rows[:, None] * (H * D) + head * D + columns[None, :]
            q = tl.load(q_ptr + at, mask=is_row[:, None], other=0.0)
            grad = tl.load(grad_ptr + at, mask=is_row[:, None], other=0.0)
            lse = tl.load(lse_ptr + head * num_tokens + rows, mask=is_row, other=0.0)
            delta = tl.load(delta_ptr + head * num_tokens + rows, mask=is_row, other=0.0)
            start = tl.load(start_ptr + rows, mask=is_row, other=num_tokens)
            is_seen = (keys[:, None] <= rows[None, :]) & (keys[:, None] >= start[None, :])
            scores = tl.dot(k, tl.trans(q)) * scale
            weights = tl.where(is_seen, tl.exp2(scores - lse[None, :]), 0.0)
            dv += tl.dot(weights.to(grad.dtype), grad)
            dweights = tl.dot(v, tl.trans(grad))
            dscores = weights * (dweights - delta[None, :])
            dk += tl.dot(dscores.to(q.dtype), q)
    tl.store(dk_ptr + at_keys, (dk * softmax_scale).to(dk_ptr.dtype.element_ty), mask=is_key[:, None])
    tl.store(dv_ptr + at_keys, dv.to(dv_ptr.dtype.element_ty), mask=is_key[:, None])


@torch.library.custom_op("tunewell::document_attention", mutates_args={})
def _attend(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, starts_T: Tensor, ends_T: Tensor, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output and the logarithm (base 2) of the sum of the weights."""
    num_tokens, heads, size = q_THD.shape
    out, lse = torch.empty_like(q_THD), q_THD.new_empty((heads, num_tokens), dtype=torch.float32)
    _forward[(triton.cdiv(num_tokens, _FORWARD["M"]), heads)](
        q_THD, k_TGD, v_TGD, starts_T, out, lse, num_tokens, softmax_scale * _LOG2_E,
        H=heads, GROUP=heads // k_TGD.shape[1], D=size, **_FORWARD,
    )  # fmt: skip
    return out, lse


@_attend.register_fake
def _(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, starts_T: Tensor, ends_T: Tensor, softmax_scale: float) -> Any:
    num_tokens, heads, _ = q_THD.shape
    return torch.empty_like(q_THD), q_THD.new_empty((heads, num_tokens), dtype=torch.float32)


@torch.library.custom_op("tunewell::document_attention_backward", mutates_args={})
def _attend_backward(
    grad_THD: Tensor,
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    starts_T: Tensor,
    ends_T: Tensor,
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values."""
    num_tokens, heads, size = q_THD.shape
    groups = k_TGD.shape[1]
    dq, dk, dv, delta = map(torch.empty_like, (q_THD, k_TGD, v_TGD, lse_HT))
    sizes: Any = {"H": heads, "GROUP": heads // groups, "D": size}
    scale = softmax_scale * _LOG2_E
    _backward_queries[(triton.cdiv(num_tokens, _QUERIES["M"]), heads)](
        q_THD, k_TGD, v_TGD, out_THD, grad_THD, lse_HT, starts_T, dq, delta, num_tokens, scale, softmax_scale,
        **sizes, **_QUERIES,
    )  # fmt: skip
    _backward_keys[(triton.cdiv(num_tokens, _KEYS["N"]), groups)](
        q_THD, k_TGD, v_TGD, grad_THD, lse_HT, delta, ends_T, starts_T, dk, dv, num_tokens, scale, softmax_scale,
        **sizes, **_KEYS,
    )  # fmt: skip
    return dq, dk, dv


@_attend_backward.register_fake
def _(grad_THD: Tensor, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, *others: Any) -> Any:
    return torch.empty_like(q_THD), torch.empty_like(k_TGD), torch.empty_like(v_TGD)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:5])
    ctx.softmax_scale = inputs[5]


def _differentiate(ctx: Any, grad_THD: Tensor, _: Any) -> Any:
    found = _attend_backward(grad_THD.contiguous(), *ctx.saved_tensors, ctx.softmax_scale)
    return *found, None, None, None


_attend.register_autograd(_differentiate, setup_context=_save)


def attend_in_documents(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, *, starts_T: Tensor, ends_T: Tensor, scale: float | None
) -> Tensor:
    """Attend causally within each document. All tensors are contiguous; starts and ends are int32."""
    return _attend(q_THD, k_TGD, v_TGD, starts_T, ends_T, scale or q_THD.shape[-1] ** -0.5)[0]
