"""Batched decoding with a static KV cache: a fixed number of slots, and the attention that reads them.

    slot 0    a a a a a . . . .      the tokens of one prompt and its answer, at most `capacity`
    slot 1    b b b . . . . . .      `lengths` is the number of tokens in each slot: [5, 3]

Prompts are packed into one row, as in training (`models/attention.py`). Then each step appends one token to every slot.
All tensors keep their shape and address, so a step can be recorded as a CUDA graph. The attention is registered with
transformers under our own name and receives the cache through the model's keyword arguments. transformers' own cache is
not used.

Shapes: S slots, M capacity, T tokens, V vocabulary, H query heads, G key and value heads, D head size.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.generation.logits_process import TopPLogitsWarper

from tunewell.core.errors import UserError
from tunewell.data.batches import MicroBatch, cumulative_lengths, share_prefix
from tunewell.methods.base import weights_cast
from tunewell.model_files.families import ATTENTION, table
from tunewell.models.attention import (
    Scores,
    forward_inputs,
    packed_flash,
    packed_sdpa,
    using_attention,
    with_layout,
    with_sinks,
)
from tunewell.models.cpu_attention import MAX_LENGTH
from tunewell.models.fp32_modules import compute_dtype
from tunewell.models.states import prepare_packing
from tunewell.models.support import eval_mode, fit_packing, is_verified, stock_mode

CACHED = "tunewell_cached"
_FLASH_DTYPES = (torch.bfloat16, torch.float16)
_FLASH_HEAD_SIZE = 256
MIN_GRAPH_STEPS = 16
"""Recording a CUDA graph takes about as long as this many steps."""


@dataclass(frozen=True)
class Generated:
    """The generated tokens of one answer."""

    ids: list[int]
    """Token ids, without the stop token."""
    ended: bool
    """Whether the model produced a stop token before the limit."""


@dataclass(frozen=True)
class Decoding:
    """Sampling settings and batch size."""

    temperature: float = 0.0
    """0 is greedy decoding."""
    top_p: float = 1.0
    """Nucleus sampling: sample from the most probable tokens with this total probability."""
    seed: int = 0
    batch_tokens: int | None = None
    """Maximum tokens of prompts and answers decoded together; None chooses by free memory."""


GREEDY = Decoding()


def context_limit(model: PreTrainedModel) -> int:
    """Return the model's context length in tokens, or a huge number if its config does not set one."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 62


def can_skip_logits(model: PreTrainedModel) -> bool:
    """Return whether the model can compute the logits of some tokens only."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


@contextmanager
def decoding_mode(model: PreTrainedModel) -> Iterator[None]:
    """Prepare a model for `Decoder` inside a `with` block: eval mode, cached attention, adapters in its dtype."""
    AttentionInterface.register(CACHED, cached_attention)
    prepare_packing(model)  # a model that was loaded for transformers' attention is not
    with eval_mode(model), using_attention(model, CACHED), weights_cast(model):
        yield


def why_not_decoded(model: PreTrainedModel, longest: int) -> str | None:
    """Return why `Decoder` cannot run texts of `longest` tokens, or None if it can."""
    try:
        packing = fit_packing(model.config, longest=longest)
    except UserError as error:
        return error.what
    if packing.level != ATTENTION:
        return packing.because or "its layers carry a state"
    if model.config.model_type in table()["not_decoded"]:
        return "its attention has more than one set of keys and values"
    if model not in _CHECKED:
        _CHECKED[model] = None if is_verified(model.config) else _difference(model)
    return _CHECKED[model]


_CHECKED: WeakKeyDictionary[PreTrainedModel, str | None] = WeakKeyDictionary()
_PROBE = (7, 3)
"""Prompt tokens and steps used to compare an untested architecture with transformers."""
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 2e-2}


@torch.no_grad()
def _difference(model: PreTrainedModel) -> str | None:
    """Compare the decoder with transformers on a few tokens. Return a message if they differ by more than rounding."""
    size, num_steps = _PROBE
    table: Any = model.get_input_embeddings().weight
    ids = torch.linspace(0, len(table) - 1, size + num_steps).long().tolist()
    try:
        with decoding_mode(model):
            decoder = Decoder(model, num_slots=1, capacity=len(ids))
            decoder.add([0], [ids[:size]])
            for token in ids[size:]:
                decoder.tokens.fill_(token)
                decoder.step()
            found = decoder.logits.float()
    except (NotImplementedError, TypeError, RuntimeError) as error:
        return f"`{model.config.model_type}` cannot be decoded from a static cache: {error}"
    with stock_mode(model):
        output: Any = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False)
    expected = output.logits[:, -1].float()
    distance = float((found - expected).abs().max() / expected.abs().max())
    if distance <= _TOLERANCE.get(compute_dtype(model), 1e-3):
        return None
    return f"`{model.config.model_type}` decoded from a static cache differs from transformers by {distance:.1e}"


@dataclass
class Sampler:
    """Chooses the next tokens, greedily or by sampling with its own random generator."""

    _decoding: Decoding
    _generator: torch.Generator | None = None

    @property
    def is_greedy(self) -> bool:
        return self._decoding.temperature <= 0

    def __call__(self, logits_SV: Tensor) -> Tensor:
        """Return one token per row of logits."""
        if self.is_greedy:
            return logits_SV.argmax(-1)
        self._generator = self._generator or torch.Generator(logits_SV.device).manual_seed(self._decoding.seed)
        logits_SV = logits_SV.float()
        # Without the maximum, a very low temperature would overflow.
        logits_SV = (logits_SV - logits_SV.amax(-1, keepdim=True)) / self._decoding.temperature
        if self._decoding.top_p < 1:
            logits_SV = TopPLogitsWarper(self._decoding.top_p)(None, logits_SV)  # type: ignore[arg-type]  ids unused
        return torch.multinomial(logits_SV.softmax(-1), 1, generator=self._generator)[:, 0]


class Decoder:
    """Decodes the prompts in the slots of a KV cache. Each step appends one token to every slot.

    Every call must be inside `decoding_mode(model)`.
    """

    def __init__(self, model: PreTrainedModel, *, num_slots: int, capacity: int, decoding: Decoding = GREEDY) -> None:
        self.model, self.device = model, model.device
        self.cache = KVCache(num_slots, capacity, self.device)
        self.tokens = torch.zeros(num_slots, dtype=torch.long, device=self.device)
        """The last token of each slot, which is not in the cache yet."""
        self._sample = Sampler(decoding)
        self._graph: torch.cuda.CUDAGraph | None = None
        self.logits = torch.zeros(0, device=self.device)
        """Logits of the last step, [slots, vocabulary]."""
        self._graph_logits = self.logits
        self._may_record = self.device.type == "cuda"
        self._keeps_some = can_skip_logits(model)

    @torch.no_grad()
    def add(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        """Add prompts to slots and compute the first token of each answer. `logits` has one row per prompt."""
        batch = _packed(prompts)
        shared = share_prefix(batch, longest=MAX_LENGTH) if self.device.type == "cpu" else None
        lengths = np.asarray(batch.lengths)
        rows = np.repeat(np.asarray(slots) * self.cache.capacity, lengths) + batch.position_ids
        sources = np.arange(len(rows)) if shared is None else shared.token_index
        ids, positions, layout = forward_inputs(batch, shared)
        if self.device.type == "cuda":
            layout |= {"packed_bounds": self._tensor(cumulative_lengths(batch)), "packed_longest": max(batch.lengths)}
        self.cache.begin_prompts(self._tensor(rows), self._tensor(sources))
        last = self._tensor(sources[np.cumsum(lengths) - 1])
        self.logits = self._forward(self._tensor(ids)[None], self._tensor(positions)[None], keep=last, **layout)[0]
        at = self._tensor(np.asarray(slots))
        self.tokens[at] = self._sample(self.logits)
        self.cache.lengths[at] = self._tensor(lengths)

    @torch.no_grad()
    def step(self) -> None:
        """Append the last tokens to the cache and compute the next ones."""
        if self._graph is not None:
            self._graph.replay()
            self.logits = self._graph_logits
        else:
            self.logits = self._step_logits()
        if self._graph is None or not self._sample.is_greedy:
            self.tokens.copy_(self._sample(self.logits))
        self.cache.lengths.add_(1).clamp_(max=self.cache.capacity - 1)

    @torch.no_grad()
    def record(self) -> None:
        """Record a step as a CUDA graph, if the model allows it, so that the host does not launch each kernel."""
        if not self._may_record:
            return
        self._may_record = False
        self.cache.visible = self.cache.capacity
        stream, graph = torch.cuda.Stream(self.device), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            # The first pass, outside the graph, selects kernels. The next step stores the same keys and values again.
            self._step_logits()
            # Other threads may be copying a checkpoint.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._graph_logits = self._step_logits()
                if self._sample.is_greedy:
                    self.tokens.copy_(self._sample(self._graph_logits))
            except RuntimeError as error:
                # Some models, such as mixture-of-experts models, wait for the GPU within a step.
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                is_recorded = False
            else:
                is_recorded = True
            finally:
                with suppress(RuntimeError):
                    graph.capture_end()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        self._graph = graph if is_recorded else None

    def show(self, visible: int) -> None:
        """Set how many tokens of each slot attention reads. A recorded step reads all, because its shapes are fixed."""
        self.cache.visible = self.cache.capacity if self._graph is not None else min(visible, self.cache.capacity)

    def keep(self, slots: Sequence[int]) -> None:
        """Keep only these slots, in this order."""
        at = self._tensor(np.asarray(slots))
        self.cache, self.tokens, self._graph = self.cache.select(at), self.tokens[at], None

    def _step_logits(self) -> Tensor:
        self.cache.begin_step()
        return self._forward(self.tokens[:, None], self.cache.lengths[:, None])[:, -1]

    def _forward(self, ids: Tensor, positions: Tensor, *, keep: Tensor | None = None, **layout: Any) -> Tensor:
        some: Any = {"logits_to_keep": keep} if keep is not None and self._keeps_some else {}
        output: Any = self.model(
            input_ids=ids, position_ids=positions, use_cache=False, kv_cache=self.cache, **layout, **some
        )
        return output.logits if keep is None or some else output.logits[:, keep]

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device)


def _packed(prompts: Sequence[Sequence[int]]) -> MicroBatch:
    lengths = [len(prompt) for prompt in prompts]
    nothing = np.zeros(0, np.int64)
    return MicroBatch(
        input_ids=np.concatenate([np.asarray(prompt, np.int64) for prompt in prompts]),
        position_ids=np.concatenate([np.arange(length) for length in lengths]),
        lengths=tuple(lengths),
        rows=nothing,
        targets=nothing,
        documents=(),
        num_tokens=sum(lengths),
    )


class KVCache:
    """Keys and values of every attention layer, by slot."""

    def __init__(self, num_slots: int, capacity: int, device: torch.device) -> None:
        self.num_slots, self.capacity = num_slots, capacity
        self.lengths = torch.zeros(num_slots, dtype=torch.long, device=device)
        self.visible = capacity
        """Tokens per slot that attention reads: at least the longest slot and the new token. Fixed in a CUDA graph."""
        self._layers: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self._rows: Tensor | None = None
        self._sources: Tensor | None = None
        self._starts = torch.arange(num_slots, device=device) * capacity

    def begin_prompts(self, rows: Tensor, sources: Tensor) -> None:
        """Store token `sources[i]` of the next forward pass in row `rows[i]`, which is slot * capacity + position."""
        self._rows, self._sources = rows, sources

    def begin_step(self) -> None:
        """Store one token per slot in the next forward pass, after the last token."""
        self._rows, self._sources = self._starts + self.lengths, None

    @property
    def is_step(self) -> bool:
        return self._sources is None

    def store(self, layer: nn.Module, k_TGD: Tensor, v_TGD: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values of a layer, and return all keys and values as [S * M, G, D]."""
        if layer not in self._layers:
            shapes = [(self.num_slots * self.capacity, *x.shape[1:]) for x in (k_TGD, v_TGD)]
            # Zeros, because attention multiplies values beyond a slot's length by zero, and NaN times zero is NaN.
            self._layers[layer] = (k_TGD.new_zeros(shapes[0]), v_TGD.new_zeros(shapes[1]))
        stored = self._layers[layer]
        assert self._rows is not None
        for cache, new in zip(stored, (k_TGD, v_TGD), strict=True):
            cache.index_copy_(0, self._rows, new if self._sources is None else new.index_select(0, self._sources))
        return stored

    def select(self, slots: Tensor) -> "KVCache":
        """Return a cache with only these slots."""
        fewer = KVCache(len(slots), self.capacity, self.lengths.device)
        fewer.lengths.copy_(self.lengths[slots])
        for layer, (keys, values) in self._layers.items():
            k, v = (x.unflatten(0, (self.num_slots, self.capacity))[slots].flatten(0, 1) for x in (keys, values))
            fewer._layers[layer] = (k, v)
        return fewer


def cached_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Store new keys and values and attend within each slot, as a function of transformers' attention interface."""
    options = with_layout(module, options)
    cache: KVCache | None = options.pop("kv_cache", None)
    if cache is None:
        raise NotImplementedError("this model does not pass our KV cache to its attention")
    scores = Scores.read(query, options)
    is_flash = scores.softcap is None and scores.sinks_H is None and _can_flash(query, key, value)
    if not cache.is_step:
        cache.store(module, key[0].transpose(0, 1), value[0].transpose(0, 1))
        packed = packed_flash if is_flash else packed_sdpa
        return packed(module, query, key, value, attention_mask, **options)
    # What the model needs beyond these settings was checked with its prompt.
    keys, values = cache.store(module, key[:, :, 0], value[:, :, 0])
    attend = _attend_flash if is_flash else _attend_masked
    return attend(query[:, :, 0], keys, values, cache, scores).unsqueeze(1), None


def _can_flash(query: Tensor, key: Tensor, value: Tensor) -> bool:
    sizes = query.shape[-1], key.shape[-1], value.shape[-1]
    is_one_size = len(set(sizes)) == 1 and sizes[0] <= _FLASH_HEAD_SIZE and sizes[0] % 8 == 0
    is_one_type = query.dtype == key.dtype == value.dtype and query.dtype in _FLASH_DTYPES
    return query.device.type == "cuda" and is_one_size and is_one_type


def _attend_flash(q_SHD: Tensor, keys: Tensor, values: Tensor, cache: KVCache, scores: Scores) -> Tensor:
    """Attend with torch's flash kernel, which reads only the used part of a slot.

    Without a window, the query heads that share a key head are passed as queries of one head. The kernel then reads
    each key once instead of once per query head.
    """
    group = q_SHD.shape[1] // keys.shape[1] if scores.window is None else 1
    # [S, G * Q, D] -> [S * Q, G, D], and back below
    q = q_SHD.unflatten(1, (-1, group)).transpose(1, 2).flatten(0, 1).contiguous()
    slots = torch.arange(cache.num_slots + 1, device=q_SHD.device, dtype=torch.int32)
    out, *_ = torch.ops.aten._flash_attention_forward(
        q,
        keys,
        values,
        slots * group,
        slots * cache.capacity,
        group,
        cache.capacity,
        0.0,
        group == 1,
        False,
        scale=scores.scale,
        window_size_left=-1 if scores.window is None else scores.window - 1,
        window_size_right=0 if group == 1 else -1,
        seqused_k=(cache.lengths + 1).int(),
    )
    return out.unflatten(0, (-1, group)).transpose(1, 2).flatten(1, 2)


def _attend_masked(q_SHD: Tensor, keys: Tensor, values: Tensor, cache: KVCache, scores: Scores) -> Tensor:
    """Attend with a mask over the slots. Query heads that share a key head are grouped, so no key is repeated."""
    shape = (cache.num_slots, cache.capacity)
    k_SGMD, v_SGMD = (x.unflatten(0, shape)[:, : cache.visible].transpose(1, 2) for x in (keys, values))
    q_SGLD = q_SHD.unflatten(1, (k_SGMD.shape[1], -1))
    position = torch.arange(cache.visible, device=q_SHD.device)
    last = cache.lengths[:, None]
    mask_SM = position <= last
    if scores.window is not None:
        mask_SM = mask_SM & (position > last - scores.window)
    mask, scale, softcap = mask_SM[:, None, None], scores.scale, scores.softcap
    if scores.sinks_H is not None:
        num_heads = q_SHD.shape[1]
        k_SHMD, v_SHMD = (x.repeat_interleave(num_heads // x.shape[1], 1) for x in (k_SGMD, v_SGMD))
        sunk = with_sinks(q_SHD.unsqueeze(2), k_SHMD, v_SHMD, mask[:, 0], scores=scores)
        return F.scaled_dot_product_attention(*sunk[:3], attn_mask=sunk[3][:, None], scale=scale).flatten(1, 2)
    if softcap is None:
        return F.scaled_dot_product_attention(q_SGLD, k_SGMD, v_SGMD, attn_mask=mask, scale=scale).flatten(1, 2)
    s_SGLM = torch.tanh(q_SGLD @ k_SGMD.transpose(2, 3) * scale / softcap) * softcap
    weights = torch.softmax(s_SGLM.masked_fill(~mask, float("-inf")), -1, dtype=torch.float32)
    return (weights.to(q_SHD.dtype) @ v_SGMD).flatten(1, 2)
