"""Packed attention: several documents in one row without padding. No token attends to another document.

    tokens    a a a a b b c c c c c        one row of T tokens
    bounds    0       4   6         11     where documents begin and end
    runs      (1, 4) (1, 2) (1, 5)         consecutive documents of equal length: (number, length)

Two implementations are registered with transformers under our own names, without patching. `tunewell_documents` calls
torch's SDPA once per run of equal lengths, on any device. `tunewell_varlen` calls our Triton kernels on Hopper GPUs and
torch's variable-length flash kernel on others. Both receive the layout through the model's keyword arguments.

Documents that start with the same tokens, such as a system prompt, may share them as the first run:

    tokens    s s s a a a a b b c c c c c  `packed_prefix` = 3, runs (1, 3) (1, 4) (1, 2) (1, 5)

Every later document attends to the shared prefix as if it were its own start.

Shapes: T tokens, N documents, L tokens per document, K keys, H query heads, G key and value heads, D head size.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel

from tunewell.core.arrays import Ints
from tunewell.data.batches import MicroBatch, SharedPrefix
from tunewell.models.cpu_attention import MAX_LENGTH, Runs, causal_attention
from tunewell.models.fp32_modules import compute_dtype

# The names must not contain "sdpa" or "flash", which transformers treats as its own backends.
SDPA, FLASH = "tunewell_documents", "tunewell_varlen"
LAYOUT_KEYS = frozenset({"packed_runs", "packed_prefix", "packed_bounds", "packed_longest", "packed_spans", "kv_cache"})
"""Our keyword arguments of a model's forward pass: the layout of a packed row, and the decoder's cache."""
# Where the Triton kernels are faster than torch's flash kernel (benchmarks/RESULTS.md).
_LONGEST_MEASURED, _HEAD_SIZES, _HOPPER = 8192, (64, 128), (9, 0)
_HAS_GQA_SWITCH = "enable_gqa" in inspect.signature(varlen_attn).parameters


def is_packed(model: PreTrainedModel) -> bool:
    """Return whether a model uses our attention, so that several documents can share a row."""
    return model.config._attn_implementation in (SDPA, FLASH)


def runs_of(lengths: Sequence[int]) -> Runs:
    """Group consecutive documents of equal length into (number, length) pairs."""
    return tuple((len(list(run)), length) for length, run in groupby(lengths))


def forward_inputs(batch: MicroBatch, shared: SharedPrefix | None) -> tuple[Ints, Ints, dict[str, Any]]:
    """Return the ids and the positions of the computed tokens, and the layout for `packed_sdpa`."""
    if shared is None:
        return batch.input_ids, batch.position_ids, {"packed_runs": runs_of(batch.lengths)}
    # The prefix is a separate run, even if the next document has the same length.
    runs = ((1, shared.size), *runs_of(shared.lengths[1:]))
    computed = batch.input_ids[shared.computed], batch.position_ids[shared.computed]
    return *computed, {"packed_runs": runs, "packed_prefix": shared.size}


def packed_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attend within each document and to the shared prefix, with the signature of transformers' attention interface.

    On a CPU, short documents use `causal_attention`. All other cases use torch's SDPA, run by run.
    """
    options = with_layout(module, options)
    runs, prefix = options.get("packed_runs"), options.get("packed_prefix", 0)
    _require_packed(attention_mask, runs, options)
    assert runs and (not prefix or runs[0] == (1, prefix))
    q_HTD, k_GTD, v_GTD = query[0], key[0], value[0]
    scores = Scores.read(q_HTD, options)
    is_short = prefix > 0 or max(length for _, length in runs) <= MAX_LENGTH
    # Check all three: under autocast, queries and keys are rotated in fp32, but values are in 16 bits.
    is_fp32 = query.dtype == key.dtype == value.dtype == torch.float32
    is_plain = scores.window is None and scores.softcap is None and scores.sinks_H is None and not scores.dropout
    if query.device.type == "cpu" and is_fp32 and is_short and is_plain:
        out_THD = causal_attention(q_HTD, k_GTD, v_GTD, runs=runs, prefix=prefix, scale=scores.scale)
    else:
        out_THD = _attend_by_run(q_HTD, k_GTD, v_GTD, runs=runs, has_prefix=prefix > 0, scores=scores)
    return out_THD.unsqueeze(0), None


@dataclass(frozen=True)
class Scores:
    """The settings with which a model computes attention weights from queries and keys."""

    scale: float
    dropout: float
    window: int | None
    softcap: float | None
    sinks_H: Tensor | None = None
    """Attention sinks: a learned score of each head, which takes part in the softmax and adds nothing."""

    @classmethod
    def read(cls, q_HTD: Tensor, options: dict[str, Any]) -> "Scores":
        """Read the settings from the keyword arguments of transformers' attention interface."""
        scaling = options.get("scaling")
        scale = q_HTD.shape[-1] ** -0.5 if scaling is None else scaling
        window, softcap = options.get("sliding_window"), options.get("softcap")
        return cls(scale, options.get("dropout", 0.0), window, softcap, options.get("s_aux"))


def _attend_by_run(
    q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, *, runs: Runs, has_prefix: bool, scores: Scores
) -> Tensor:
    """Attend run by run, with one call for documents of equal length. Return [T, H, D]."""
    prefix: tuple[Tensor, Tensor] | None = None
    parts = []
    sizes = [number * length for number, length in runs]
    # Split once instead of slicing for each run, because the gradient of a slice is as large as the whole tensor.
    pieces = zip(*(x.split(sizes, 1) for x in (q_HTD, k_GTD, v_GTD)), strict=True)
    for (number, length), piece in zip(runs, pieces, strict=True):
        # [H, N * L, D] -> [N, H, L, D], without copying
        q_NHLD, k_NGKD, v_NGKD = (x.unflatten(1, (number, length)).transpose(0, 1) for x in piece)
        if prefix is not None:
            k_NGKD, v_NGKD = (
                torch.cat([shared.expand(number, -1, -1, -1), x], 2)
                for shared, x in zip(prefix, (k_NGKD, v_NGKD), strict=True)
            )
        elif has_prefix:
            prefix = k_NGKD, v_NGKD
        parts.append(_attend(q_NHLD, k_NGKD, v_NGKD, scores).flatten(0, 1))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _attend(q_NHLD: Tensor, k_NGKD: Tensor, v_NGKD: Tensor, scores: Scores) -> Tensor:
    """Attend within documents of one length. The queries belong to the last L keys. Return [N, L, H, D]."""
    (heads, length, _), num_keys = q_NHLD.shape[1:], k_NGKD.shape[2]
    window = scores.window if scores.window is not None and scores.window < num_keys else None
    if scores.softcap is not None:  # torch's kernels do not support it
        k_NHKD, v_NHKD = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k_NGKD, v_NGKD))
        s_NHLK = torch.tanh(q_NHLD @ k_NHKD.transpose(2, 3) * scores.scale / scores.softcap) * scores.softcap
        s_NHLK = s_NHLK.masked_fill(~_band_mask(length, num_keys, window, q_NHLD.device), float("-inf"))
        return (torch.softmax(s_NHLK, -1, dtype=torch.float32).to(q_NHLD.dtype) @ v_NHKD).transpose(1, 2)
    is_causal = window is None and num_keys == length and scores.sinks_H is None
    mask_LK = None if is_causal else _band_mask(length, num_keys, window, q_NHLD.device)
    if scores.sinks_H is not None:
        assert mask_LK is not None
        q_NHLD, k_NGKD, v_NGKD, mask_LK = with_sinks(q_NHLD, k_NGKD, v_NGKD, mask_LK, scores=scores)
    out = F.scaled_dot_product_attention(
        q_NHLD,
        k_NGKD,
        v_NGKD,
        attn_mask=mask_LK,
        dropout_p=scores.dropout,
        is_causal=is_causal,
        scale=scores.scale,
        enable_gqa=heads != k_NGKD.shape[1],
    )
    return out.transpose(1, 2)


def with_sinks(
    q_NHLD: Tensor, k_NGKD: Tensor, v_NGKD: Tensor, mask: Tensor, *, scores: Scores
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Append a key with the score of the sink and the value zero, which every query sees.

    The score is a further dimension of the queries, in which only this key is not zero. torch's kernels take sizes that
    are multiples of 8.
    """
    assert scores.sinks_H is not None
    sinks_H11 = (scores.sinks_H / scores.scale).to(q_NHLD.dtype)[:, None, None]
    score_NHL1 = sinks_H11.expand(*q_NHLD.shape[:3], 1)
    q_NHLD = torch.cat([q_NHLD, F.pad(score_NHL1, (0, 7))], -1)
    one_1 = k_NGKD.new_ones(*k_NGKD.shape[:2], 1, 1)
    k_NGKD = torch.cat([F.pad(k_NGKD, (0, 8)), F.pad(one_1, (k_NGKD.shape[-1], 7))], 2)
    return q_NHLD, k_NGKD, F.pad(v_NGKD, (0, 0, 0, 1)), F.pad(mask, (0, 1), value=True)


def _band_mask(length: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return the causal sliding-window mask, which is True where a query attends to a key."""
    position = torch.arange(num_keys, device=device)
    distance = position[num_keys - length :, None] - position[None, :]
    return (distance >= 0) & (distance < (window or num_keys))


def packed_flash(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attend within each document (transformers' attention interface).

    With `packed_spans`, where each token's document begins and ends, this uses our Triton kernels, otherwise torch's
    variable-length flash kernel.
    """
    options = with_layout(module, options)
    bounds: Any = options.get("packed_bounds")
    _require_packed(attention_mask, bounds, options)
    scores, longest = Scores.read(query, options), options["packed_longest"]
    if scores.sinks_H is not None:
        raise NotImplementedError("the flash kernel does not support attention sinks: set `train.attention: sdpa`")
    if scores.softcap is not None:
        raise NotImplementedError("the flash kernel does not support softcap: set `train.attention: sdpa`")
    if scores.dropout:
        raise NotImplementedError("the flash kernel does not support dropout: set `train.attention: sdpa`")
    # Models with fp32 weights rotate queries and keys in fp32, which the kernel does not accept.
    q, k, v = (x[0].transpose(0, 1).to(value.dtype).contiguous() for x in (query, key, value))
    window = scores.window if scores.window is not None and scores.window < longest else None
    if options.get("packed_spans") is not None and window is None:
        from tunewell.models.triton_attention import attend_in_documents

        starts, ends = options["packed_spans"]
        return attend_in_documents(q, k, v, starts_T=starts, ends_T=ends, scale=scores.scale).unsqueeze(0), None
    # The kernel's window counts only the keys before a query; transformers' window includes the query's own key.
    left = -1 if window is None else window - 1
    more: Any = {"enable_gqa": q.shape[1] != k.shape[1]} if _HAS_GQA_SWITCH else {}
    out: Any = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scores.scale, window_size=(left, 0), **more)
    return out.unsqueeze(0), None


def can_use_triton(model: PreTrainedModel, longest: int) -> bool:
    """Return whether the Triton kernels support this model and are faster than torch's, as far as we measured."""
    return (
        model.device.type == "cuda"
        and longest <= _LONGEST_MEASURED
        and head_size(model.config.get_text_config()) in _HEAD_SIZES
        and torch.cuda.get_device_capability(model.device) == _HOPPER
        and find_spec("triton") is not None
    )


def head_size(config: Any) -> int:
    """Return the size of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def with_layout(module: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an attention, with the layout that its decoder layer did not pass on to it."""
    if not LAYOUT_KEYS.isdisjoint(options):
        return options
    return options | getattr(module, "packed_layout", {})


def _require_packed(mask: Tensor | None, layout: Any, options: dict[str, Any]) -> None:
    """Raise NotImplementedError if a model's attention needs a feature that packed attention does not support."""
    if layout is None:
        raise NotImplementedError("this model does not pass the layout of packed documents to its attention")
    if mask is not None:
        raise NotImplementedError("this model creates its own attention mask, which packed attention cannot apply")
    if options.get("position_bias") is not None:
        raise NotImplementedError("this model adds a position bias, which packed attention does not support")


def register() -> None:
    """Register both implementations with transformers. Calling it twice is harmless.

    No mask function is registered, so that transformers creates no mask and does not check for packed documents, which
    would wait for the GPU.
    """
    for name, function in ((SDPA, packed_sdpa), (FLASH, packed_flash)):
        AttentionInterface.register(name, function)


@contextmanager
def using_attention(model: PreTrainedModel, name: str, *, is_compiled: bool = False) -> Iterator[None]:
    """Use an attention implementation inside a `with` block, uncompiled unless `is_compiled`."""
    before: Any = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        with nullcontext() if is_compiled else torch.compiler.set_stance("force_eager"):
            yield
    finally:
        model.set_attn_implementation(before)


def stock_attention(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Use transformers' own attention, uncompiled, for generation and to check our attention."""
    return using_attention(model, _stock_name(model))


def unpack(model: PreTrainedModel) -> None:
    """Use transformers' own attention from now on, so that documents are computed one by one."""
    model.set_attn_implementation(_stock_name(model))


def _stock_name(model: PreTrainedModel) -> str:
    # transformers' sdpa does not support softcap, and some versions silently ignore it.
    can_sdpa = model._supports_sdpa and not _has(model, "attn_logit_softcapping")
    return "sdpa" if can_sdpa else "eager"


def fastest_attention(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Use the flash kernel for packed documents inside a `with` block, if it supports this model."""
    is_flash = (
        model.config._attn_implementation == SDPA
        and model.device.type == "cuda"
        and compute_dtype(model) in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(model.device) >= (8, 0)
        # In multi-head latent attention, values and keys have different sizes.
        and not (_has(model, "attn_logit_softcapping") or _has(model, "kv_lora_rank"))
    )
    return using_attention(model, FLASH, is_compiled=True) if is_flash else nullcontext()


def _has(model: PreTrainedModel, setting: str) -> bool:
    return getattr(model.config.get_text_config(), setting, None) is not None
