"""Attention over documents laid end to end: no padding, and no token sees another document.

    tokens    a a a a b b c c c c c        one row of T tokens
    bounds    0       4   6         11     where documents begin and end
    runs      (1, 4) (1, 2) (1, 5)         how many documents in a row have the same length

Two ways of computing it are registered with transformers under names of their own, and nothing of transformers is
changed: `tunewell_documents` attends once per run of equal lengths, on any device; `tunewell_varlen` calls torch's
kernel for variable lengths on CUDA. Both take the layout through the model's keyword arguments.

Documents that begin alike, with the same system prompt, may leave that opening to be laid out once, as the first run:

    tokens    s s s a a a a b b c c c c c  `packed_opening` = 3, runs (1, 3) (1, 4) (1, 2) (1, 5)

All documents after it see it as their own beginning.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel

from tunewell.models.cpu_attention import LONGEST, Runs, causal_attention

# Names without "sdpa" or "flash" in them: transformers takes those words for its own backends.
SDPA, FLASH = "tunewell_documents", "tunewell_varlen"
_HAS_GQA_SWITCH = "enable_gqa" in inspect.signature(varlen_attn).parameters


def runs_of(lengths: Sequence[int]) -> Runs:
    """Count documents of equal length that follow each other."""
    runs: list[tuple[int, int]] = []
    for length in lengths:
        if runs and runs[-1][1] == length:
            runs[-1] = (runs[-1][0] + 1, length)
        else:
            runs.append((1, length))
    return tuple(runs)


def packed_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed_runs: Runs | None = None,
    packed_opening: int = 0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend within each document, and to the opening they share; documents of equal length together."""
    _refuse(attention_mask, packed_runs, others)
    assert packed_runs is not None
    assert not packed_opening or packed_runs[0] == (1, packed_opening)
    is_short = packed_opening > 0 or max(length for _, length in packed_runs) <= LONGEST
    is_plain = sliding_window is None and softcap is None and not dropout
    # All three: casting as it goes, a model rotates in fp32 what it multiplies in 16 bits.
    is_fp32 = query.dtype == key.dtype == value.dtype == torch.float32
    if is_short and is_plain and is_fp32 and query.device.type == "cpu":
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        q, k, v = query[0], key[0], value[0]
        return causal_attention(q, k, v, runs=packed_runs, opening=packed_opening, scale=scale).unsqueeze(0), None
    opening: tuple[Tensor, Tensor] | None = None
    parts = []
    sizes = [number * length for number, length in packed_runs]
    # Split once, not sliced run by run: the gradient of a slice is as large as the whole.
    cut = zip(*(x[0].split(sizes, 1) for x in (query, key, value)), strict=True)
    for (number, length), run in zip(packed_runs, cut, strict=True):
        # [heads, number * length, size] -> [number, heads, length, size], without copying
        q, k, v = (x.unflatten(1, (number, length)).transpose(0, 1) for x in run)
        if opening is not None:
            k, v = (torch.cat([o.expand(number, -1, -1, -1), x], 2) for o, x in zip(opening, (k, v), strict=True))
        elif packed_opening:
            opening = k, v
        out = _attend(q, k, v, scaling=scaling, dropout=dropout, window=sliding_window, softcap=softcap)
        parts.append(out.flatten(0, 1))
    return torch.cat(parts).unsqueeze(0) if len(parts) > 1 else parts[0].unsqueeze(0), None


def _attend(
    q_NHLD: Tensor,
    k_NGKD: Tensor,
    v_NGKD: Tensor,
    *,
    scaling: float | None,
    dropout: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Attend within documents of one length, whose queries are the last of their keys; give [N, L, H, D]."""
    (heads, length, size), num_keys = q_NHLD.shape[1:], k_NGKD.shape[2]
    scale = size**-0.5 if scaling is None else scaling
    window = window if window is not None and window < num_keys else None
    if softcap is not None:
        return _softcapped(q_NHLD, k_NGKD, v_NGKD, scale=scale, softcap=softcap, window=window).transpose(1, 2)
    is_plain = window is None and num_keys == length
    out = F.scaled_dot_product_attention(
        q_NHLD,
        k_NGKD,
        v_NGKD,
        attn_mask=None if is_plain else _band(length, num_keys, window, q_NHLD.device),
        dropout_p=dropout,
        is_causal=is_plain,
        scale=scale,
        enable_gqa=heads != k_NGKD.shape[1],
    )
    return out.transpose(1, 2)


def packed_flash(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed_bounds: Tensor | None = None,
    packed_longest: int = 0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend within each document by torch's flash kernel for variable lengths; key and value heads stay few."""
    _refuse(attention_mask, packed_bounds, others)
    if softcap is not None:
        raise NotImplementedError("the flash kernel knows no softcap: set `train.attention: sdpa`")
    if dropout:
        raise NotImplementedError("the flash kernel drops nothing: set `train.attention: sdpa`")
    assert packed_bounds is not None
    # Rotating in fp32, as models kept in fp32 do, leaves queries and keys wider than the kernel takes.
    q, k, v = (x[0].transpose(0, 1).to(value.dtype).contiguous() for x in (query, key, value))
    # The kernel counts the keys before a query; a window in transformers counts the query's own key too.
    left = -1 if sliding_window is None or sliding_window >= packed_longest else sliding_window - 1
    more: Any = {"enable_gqa": q.shape[1] != k.shape[1]} if _HAS_GQA_SWITCH else {}
    out = varlen_attn(
        q,
        k,
        v,
        packed_bounds,
        packed_bounds,
        packed_longest,
        packed_longest,
        scale=scaling,
        window_size=(left, 0),
        **more,
    )
    assert isinstance(out, Tensor)
    return out.unsqueeze(0), None


def _refuse(mask: Tensor | None, layout: Any, others: dict[str, Any]) -> None:
    if layout is None:
        raise NotImplementedError("this model does not hand the layout of its documents on to its attention")
    if mask is not None:
        raise NotImplementedError("this model makes an attention mask of its own, which packed documents cannot honour")
    if others.get("s_aux") is not None:
        raise NotImplementedError("this model has attention sinks, which packed attention does not know")
    if others.get("position_bias") is not None:
        raise NotImplementedError("this model adds position biases to its attention, which packed attention lacks")


def _band(length: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    at = torch.arange(num_keys, device=device)
    distance = at[num_keys - length :, None] - at[None, :]
    return (distance >= 0) & (distance < (window or num_keys))


def _softcapped(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, softcap: float, window: int | None
) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.tanh(query @ key.transpose(2, 3) * scale / softcap) * softcap
    scores = scores.masked_fill(~_band(query.shape[2], key.shape[2], window, query.device), float("-inf"))
    return torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype) @ value


def register() -> None:
    """Make both ways known to transformers, by its own interface; calling it twice does no harm.

    No mask is registered for them: transformers makes none then, nor looks for packed documents, which would wait for
    the device.
    """
    for name, function in ((SDPA, packed_sdpa), (FLASH, packed_flash)):
        AttentionInterface.register(name, function)


@contextmanager
def stock_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let a model attend as transformers does by default, uncompiled: for generating, and for checking ours."""
    before: Any = model.config._attn_implementation
    # transformers' own sdpa knows no softcap, and some versions leave it out without a word.
    has_softcap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    model.set_attn_implementation("sdpa" if model._supports_sdpa and not has_softcap else "eager")
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        model.set_attn_implementation(before)
