"""Attention over documents laid end to end: no padding, and no token sees another document.

    tokens    a a a a b b c c c c c        one row of T tokens
    bounds    0       4   6         11     where documents begin and end
    runs      (1, 4) (1, 2) (1, 5)         how many documents in a row have the same length

Two ways of computing it are registered with transformers under names of their own, and nothing of transformers is
changed: `tunewell_documents` calls torch's attention once per run of equal lengths, on any device; `tunewell_varlen`
calls torch's kernel for variable lengths on CUDA. Both take the layout through the model's keyword arguments.
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

# Names without "sdpa" or "flash" in them: transformers takes those words for its own backends.
SDPA, FLASH = "tunewell_documents", "tunewell_varlen"
_HAS_GQA_SWITCH = "enable_gqa" in inspect.signature(varlen_attn).parameters
Runs = tuple[tuple[int, int], ...]


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
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend within each document by torch's own attention, documents of equal length together."""
    _refuse(attention_mask, packed_runs, others)
    assert packed_runs is not None
    parts = []
    sizes = [number * length for number, length in packed_runs]
    # Split once, not sliced run by run: the gradient of a slice is as large as the whole.
    cut = zip(*(x[0].split(sizes, 1) for x in (query, key, value)), strict=True)
    for (number, length), run in zip(packed_runs, cut, strict=True):
        # [heads, number * length, size] -> [number, heads, length, size], without copying
        q, k, v = (x.unflatten(1, (number, length)).transpose(0, 1) for x in run)
        window = sliding_window if sliding_window is not None and sliding_window < length else None
        if softcap is None:
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=None if window is None else _band(length, window, q.device),
                dropout_p=dropout,
                is_causal=window is None,
                scale=scaling,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        else:
            out = _softcapped(q, k, v, scaling=scaling, softcap=softcap, window=window or length)
        parts.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts).unsqueeze(0) if len(parts) > 1 else parts[0].unsqueeze(0), None


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


def _band(length: int, window: int, device: torch.device) -> Tensor:
    at = torch.arange(length, device=device)
    distance = at[:, None] - at[None, :]
    return (distance >= 0) & (distance < window)


def _softcapped(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, softcap: float, window: int
) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.tanh(query @ key.transpose(2, 3) * scale / softcap) * softcap
    scores = scores.masked_fill(~_band(query.shape[2], window, query.device), float("-inf"))
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
