"""A KV cache with a fixed number of slots, and the attention that reads it.

    slot 0    a a a a a . . . .      the tokens of one prompt and its answer, `capacity` at most
    slot 1    b b b . . . . . .      `lengths` is how many are there: [5, 3]

Prompts enter packed end to end, as in training (`models/attention.py`); then every slot gains one token per step. All
tensors keep their shape and address, so a step can be recorded as a CUDA graph. The attention is registered with
transformers under our own name; a model passes it the cache through its keyword arguments, and transformers' own cache
is not used.

Shapes: S slots, M capacity, T tokens, H query heads, G key and value heads, D head size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from tunewell.models.attention import packed_flash, packed_sdpa

CACHED = "tunewell_cached"
_FLASH_DTYPES = (torch.bfloat16, torch.float16)
_FLASH_HEAD_SIZE = 256


class KVCache:
    """Keys and values of every attention layer, by slot."""

    def __init__(self, num_slots: int, capacity: int, device: torch.device) -> None:
        self.num_slots, self.capacity = num_slots, capacity
        self.lengths = torch.zeros(num_slots, dtype=torch.long, device=device)
        self.visible = capacity
        """Tokens of a slot that attention reads, at least the longest slot and the new token. Fixed in a graph."""
        self._layers: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self._rows: Tensor | None = None
        self._sources: Tensor | None = None
        self._starts = torch.arange(num_slots, device=device) * capacity

    def begin_prompts(self, rows: Tensor, sources: Tensor) -> None:
        """Store token `sources[i]` of the next forward pass in row `rows[i]`, which is slot * capacity + position."""
        self._rows, self._sources = rows, sources

    def begin_step(self) -> None:
        """Store the next forward pass as one token per slot, after the last."""
        self._rows, self._sources = self._starts + self.lengths, None

    @property
    def is_step(self) -> bool:
        return self._sources is None

    def store(self, layer: nn.Module, k_TGD: Tensor, v_TGD: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values of a layer; return all of them: [S * M, G, D]."""
        if layer not in self._layers:
            shapes = [(self.num_slots * self.capacity, *x.shape[1:]) for x in (k_TGD, v_TGD)]
            # Zeros: attention multiplies values beyond a slot's length by zero, and nan times zero is nan.
            self._layers[layer] = (k_TGD.new_zeros(shapes[0]), v_TGD.new_zeros(shapes[1]))
        stored = self._layers[layer]
        assert self._rows is not None
        for cache, new in zip(stored, (k_TGD, v_TGD), strict=True):
            cache.index_copy_(0, self._rows, new if self._sources is None else new.index_select(0, self._sources))
        return stored

    def select(self, slots: Tensor) -> "KVCache":
        """Return a cache with some of the slots."""
        fewer = KVCache(len(slots), self.capacity, self.lengths.device)
        fewer.lengths.copy_(self.lengths[slots])
        for layer, (keys, values) in self._layers.items():
            k, v = (x.unflatten(0, (self.num_slots, self.capacity))[slots].flatten(0, 1) for x in (keys, values))
            fewer._layers[layer] = (k, v)
        return fewer


def cached_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Store the new keys and values, and attend to those of the same slot: transformers' attention interface."""
    cache: KVCache | None = options.pop("kv_cache", None)
    if cache is None:
        raise NotImplementedError("this model does not pass our KV cache to its attention")
    softcap = options.get("softcap")
    is_flash = softcap is None and _can_flash(query, key, value)
    if not cache.is_step:
        cache.store(module, key[0].transpose(0, 1), value[0].transpose(0, 1))
        packed = packed_flash if is_flash else packed_sdpa
        return packed(module, query, key, value, attention_mask, **options)
    for name in ("s_aux", "position_bias"):
        if options.get(name) is not None:
            raise NotImplementedError(f"this model's attention has `{name}`")
    if attention_mask is not None:
        raise NotImplementedError("this model makes its own attention mask")
    keys, values = cache.store(module, key[:, :, 0], value[:, :, 0])
    scaling, window = options.get("scaling"), options.get("sliding_window")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if is_flash:
        out_SHD = _attend_flash(query[:, :, 0], keys, values, cache, scale=scale, window=window)
    else:
        out_SHD = _attend_masked(query[:, :, 0], keys, values, cache, scale=scale, window=window, softcap=softcap)
    return out_SHD.unsqueeze(1), None


def _can_flash(query: Tensor, key: Tensor, value: Tensor) -> bool:
    sizes = query.shape[-1], key.shape[-1], value.shape[-1]
    is_one_size = len(set(sizes)) == 1 and sizes[0] <= _FLASH_HEAD_SIZE and sizes[0] % 8 == 0
    is_one_type = query.dtype == key.dtype == value.dtype and query.dtype in _FLASH_DTYPES
    return query.device.type == "cuda" and is_one_size and is_one_type


def _attend_flash(
    q_SHD: Tensor, keys: Tensor, values: Tensor, cache: KVCache, *, scale: float, window: int | None
) -> Tensor:
    """Attend by torch's flash kernel, which reads only the used part of a slot; heads may share keys."""
    slots = torch.arange(cache.num_slots + 1, device=q_SHD.device, dtype=torch.int32)
    out, *_ = torch.ops.aten._flash_attention_forward(
        q_SHD.contiguous(),
        keys,
        values,
        slots,
        slots * cache.capacity,
        1,
        cache.capacity,
        0.0,
        True,
        False,
        scale=scale,
        window_size_left=-1 if window is None else window - 1,
        window_size_right=0,
        seqused_k=(cache.lengths + 1).int(),
    )
    return out


def _attend_masked(
    q_SHD: Tensor,
    keys: Tensor,
    values: Tensor,
    cache: KVCache,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Attend with a mask over the slots. The query heads of one key head are its queries, so no key is repeated."""
    shape = (cache.num_slots, cache.capacity)
    k_SGMD, v_SGMD = (x.unflatten(0, shape)[:, : cache.visible].transpose(1, 2) for x in (keys, values))
    q_SGLD = q_SHD.unflatten(1, (k_SGMD.shape[1], -1))
    position = torch.arange(cache.visible, device=q_SHD.device)
    last = cache.lengths[:, None]
    mask_SM = position <= last
    if window is not None:
        mask_SM = mask_SM & (position > last - window)
    mask = mask_SM[:, None, None]
    if softcap is None:
        return F.scaled_dot_product_attention(q_SGLD, k_SGMD, v_SGMD, attn_mask=mask, scale=scale).flatten(1, 2)
    scores = torch.tanh(q_SGLD @ k_SGMD.transpose(2, 3) * scale / softcap) * softcap
    weights = torch.softmax(scores.masked_fill(~mask, float("-inf")), -1, dtype=torch.float32)
    return (weights.to(q_SHD.dtype) @ v_SGMD).flatten(1, 2)


@contextmanager
def cached_attention_of(model: PreTrainedModel) -> Iterator[None]:
    """Use the attention of this module inside a `with` block, uncompiled."""
    AttentionInterface.register(CACHED, cached_attention)
    before: Any = model.config._attn_implementation
    model.set_attn_implementation(CACHED)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        model.set_attn_implementation(before)
