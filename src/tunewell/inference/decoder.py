"""Decode many prompts together: packed prompts, one token per slot and step, and CUDA graphs where there is a GPU.

A slot whose answer is complete takes the next prompt. On a GPU a step is recorded once and replayed; the host looks at
the tokens every few steps, so it does not wait for the GPU.
"""

import inspect
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.logits_process import TopPLogitsWarper

from tunewell.core.errors import UserError
from tunewell.data.batches import MicroBatch, cumulative_lengths, share_prefix
from tunewell.inference.kv_cache import KVCache, cached_attention_of
from tunewell.methods.base import weights_cast
from tunewell.models.attention import runs_of, stock_attention
from tunewell.models.cpu_attention import MAX_LENGTH
from tunewell.models.quiet import quiet
from tunewell.models.support import is_verified, require_supported

_PROMPT_TOKENS = 8192
"""Tokens of prompts in one forward pass."""
_MAX_GPU_SLOTS, _MAX_CPU_SLOTS = 256, 32
_CPU_TOKENS = 32768
"""Tokens of all caches on a CPU: larger batches gain nothing there."""
_MEMORY_SHARE = 0.5
"""Of the GPU memory that is free, the part that a cache may take."""
_READ_EVERY = 8
"""Steps on a GPU after which the host reads the tokens."""
MIN_GRAPH_STEPS = 16
"""A graph takes about as long to record as this many steps."""


@dataclass(frozen=True)
class Decoding:
    """Sampling settings, and the size of a batch."""

    temperature: float = 0.0
    """0 is greedy decoding."""
    top_p: float = 1.0
    """Sample from the most probable tokens that together have this probability."""
    seed: int = 0
    batch_tokens: int | None = None
    """Most tokens of the prompts and answers that are decoded together; None chooses by the free memory."""


GREEDY = Decoding()


@contextmanager
def decoding_mode(model: PreTrainedModel) -> Iterator[None]:
    """Prepare a model for `Decoder` inside a `with` block: eval mode, our attention, adapters in its precision."""
    was_training = model.training
    model.eval()
    try:
        with quiet(), cached_attention_of(model), weights_cast(model):
            yield
    finally:
        model.train(was_training)


def why_not_decoded(model: PreTrainedModel, longest: int) -> str | None:
    """Return why `Decoder` cannot run texts of so many tokens; None if it can."""
    try:
        require_supported(model.config, longest_document=longest)
    except UserError as error:
        return error.what
    if model not in _CHECKED:
        _CHECKED[model] = None if is_verified(model.config) else _difference(model)
    return _CHECKED[model]


_CHECKED: WeakKeyDictionary[PreTrainedModel, str | None] = WeakKeyDictionary()
_PROBE = (7, 3)
"""Tokens of a prompt and steps after it, by which an unknown architecture is compared with transformers."""
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 2e-2}


@torch.no_grad()
def _difference(model: PreTrainedModel) -> str | None:
    """Compare the decoder with transformers on a few tokens; return the difference if it is more than rounding."""
    size, num_steps = _PROBE
    ids = torch.linspace(0, len(model.get_input_embeddings().weight) - 1, size + num_steps).long().tolist()
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
    was_training = model.training
    model.eval()
    with quiet(), stock_attention(model):
        output: Any = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False)
    model.train(was_training)
    expected = output.logits[:, -1].float()
    distance = float((found - expected).abs().max() / expected.abs().max())
    if distance <= _TOLERANCE.get(model.dtype, 1e-3):
        return None
    return f"`{model.config.model_type}` decoded from a static cache differs from transformers by {distance:.1e}"


class Sampler:
    """Chooses the next tokens: the most probable ones, or samples from a random generator of its own."""

    def __init__(self, decoding: Decoding) -> None:
        self._decoding = decoding
        self._generator: torch.Generator | None = None

    @property
    def is_greedy(self) -> bool:
        return self._decoding.temperature <= 0

    def __call__(self, logits_SV: Tensor) -> Tensor:
        """Return a token per row of logits."""
        if self.is_greedy:
            return logits_SV.argmax(-1)
        self._generator = self._generator or torch.Generator(logits_SV.device).manual_seed(self._decoding.seed)
        logits_SV = logits_SV.float() / self._decoding.temperature
        if self._decoding.top_p < 1:
            logits_SV = TopPLogitsWarper(self._decoding.top_p)(None, logits_SV)  # type: ignore[arg-type]  ids unused
        return torch.multinomial(logits_SV.softmax(-1), 1, generator=self._generator)[:, 0]


class Decoder:
    """The slots of a model: prompts enter, and each step appends a token to every slot.

    Every call must be inside `decoding_mode(model)`.
    """

    def __init__(self, model: PreTrainedModel, *, num_slots: int, capacity: int, decoding: Decoding = GREEDY) -> None:
        self.model, self.device = model, model.device
        self.cache = KVCache(num_slots, capacity, self.device)
        self.tokens = torch.zeros(num_slots, dtype=torch.long, device=self.device)
        """The last token of each slot; it is not in the cache yet."""
        self._sample = Sampler(decoding)
        self._graph: torch.cuda.CUDAGraph | None = None
        self.logits = torch.zeros(0, device=self.device)
        """Of the last step, [slots, vocabulary]."""
        self._graph_logits = self.logits
        self._may_record = self.device.type == "cuda"
        self._keeps_some = "logits_to_keep" in inspect.signature(model.forward).parameters

    @torch.no_grad()
    def add(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        """Put prompts into slots and compute the first token of each answer; `logits` are those of these slots."""
        batch = _packed(prompts)
        shared = share_prefix(batch, longest=MAX_LENGTH) if self.device.type == "cpu" else None
        lengths = np.asarray(batch.lengths)
        rows = np.repeat(np.asarray(slots) * self.cache.capacity, lengths) + batch.position_ids
        sources = np.arange(len(rows)) if shared is None else shared.token_index
        ids, positions = batch.input_ids, batch.position_ids
        layout: dict[str, Any] = {"packed_runs": runs_of(batch.lengths)}
        if shared is not None:
            ids, positions = ids[shared.computed], positions[shared.computed]
            runs = ((1, shared.size), *runs_of(shared.lengths[1:]))
            layout = {"packed_runs": runs, "packed_prefix": shared.size}
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
        """Record a step as a CUDA graph, if the model allows it; a step then costs no time of the host."""
        if not self._may_record:
            return
        self._may_record = False
        self.cache.visible = self.cache.capacity
        stream, graph = torch.cuda.Stream(self.device), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            # The first pass outside of a graph chooses kernels. It stores what the next step stores again.
            self._step_logits()
            # Other threads may copy a checkpoint meanwhile.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._graph_logits = self._step_logits()
                if self._sample.is_greedy:
                    self.tokens.copy_(self._sample(self._graph_logits))
            except RuntimeError as error:
                # Some models, such as those with experts, wait for the GPU within a step.
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
        """Let attention read so many tokens of each slot; a recorded step reads all, as its shapes are fixed."""
        self.cache.visible = self.cache.capacity if self._graph is not None else min(visible, self.cache.capacity)

    def keep(self, slots: Sequence[int]) -> None:
        """Keep some of the slots, in this order."""
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


@dataclass
class _Answer:
    """An answer that is being written."""

    index: int
    limit: int
    ids: list[int] = field(default_factory=list)
    ended: bool = False

    def take(self, token: int, stops: Collection[int]) -> None:
        """Append a token, unless the answer is complete."""
        if self.is_complete:
            return
        if token in stops:
            self.ended = True
        else:
            self.ids.append(token)

    @property
    def is_complete(self) -> bool:
        return self.ended or len(self.ids) == self.limit


def decode(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    limits: Sequence[int],
    stop_ids: Collection[int],
    decoding: Decoding = GREEDY,
    before_token: Callable[[], None] = lambda: None,
) -> list[tuple[list[int], bool]]:
    """Return an answer per prompt, without its stop token, and whether it ended before its limit of new tokens."""
    answers = [_Answer(index, limit) for index, limit in enumerate(limits)]
    num_slots = _num_slots(model, max(map(sum, zip(map(len, prompts), limits, strict=True)), default=0), decoding)
    while unfinished := [answer for answer in answers if not answer.is_complete]:
        try:
            _decode(model, prompts, unfinished, num_slots, stop_ids, decoding, before_token)
        except torch.OutOfMemoryError:
            if num_slots == 1 or decoding.batch_tokens is not None:
                raise
            num_slots //= 2
            for answer in unfinished:
                if not answer.is_complete:
                    answer.ids.clear()
            torch.cuda.empty_cache()
    return [(answer.ids, answer.ended) for answer in answers]


def _decode(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    answers: list[_Answer],
    num_slots: int,
    stop_ids: Collection[int],
    decoding: Decoding,
    before_token: Callable[[], None],
) -> None:
    """Complete the answers, `num_slots` at a time."""
    waiting = deque(sorted(answers, key=lambda answer: len(prompts[answer.index])))
    capacity = max(len(prompts[answer.index]) + answer.limit for answer in waiting)
    slots: list[_Answer | None] = [None] * min(len(waiting), num_slots)
    decoder = Decoder(model, num_slots=len(slots), capacity=capacity, decoding=decoding)
    is_gpu = decoder.device.type == "cuda"
    while waiting or any(slots):
        if waiting and None in slots:
            before_token()
            _fill(decoder, slots, waiting, prompts, stop_ids)
            continue
        active = [slot for slot, answer in enumerate(slots) if answer]
        if len(active) <= len(slots) // 2 and not is_gpu:
            decoder.keep(active)
            slots = [slots[slot] for slot in active]
        remaining = max(answer.limit - len(answer.ids) for answer in slots if answer)
        if remaining >= MIN_GRAPH_STEPS:
            decoder.record()
        num_steps = min(_READ_EVERY if is_gpu else 1, remaining)
        longest = max(len(prompts[answer.index]) + len(answer.ids) for answer in slots if answer)
        decoder.show(longest + num_steps - 1)
        written = []
        for _ in range(num_steps):
            before_token()
            decoder.step()
            written.append(decoder.tokens.clone())
        _take(slots, range(len(slots)), torch.stack(written), stop_ids)


def _num_slots(model: PreTrainedModel, capacity: int, decoding: Decoding) -> int:
    """Return how many answers are decoded together: by the memory of their caches, and by the setting."""
    if model.device.type == "cuda":
        config = model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        token_bytes = 2 * config.num_hidden_layers * heads * size * model.dtype.itemsize
        free, _ = torch.cuda.mem_get_info(model.device)
        free += torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
        number = min(_MAX_GPU_SLOTS, int(free * _MEMORY_SHARE) // max(1, token_bytes * capacity))
    else:
        number = min(_MAX_CPU_SLOTS, _CPU_TOKENS // max(1, capacity))
    if decoding.batch_tokens is not None:
        number = min(number, decoding.batch_tokens // max(1, capacity))
    return max(1, number)


def _fill(
    decoder: Decoder,
    slots: list[_Answer | None],
    waiting: deque[_Answer],
    prompts: Sequence[Sequence[int]],
    stops: Collection[int],
) -> None:
    """Put waiting prompts into free slots, as many as one forward pass takes, and take their first tokens."""
    chosen: list[int] = []
    num_tokens = 0
    for slot in [slot for slot, answer in enumerate(slots) if answer is None]:
        if not waiting or (chosen and num_tokens + len(prompts[waiting[0].index]) > _PROMPT_TOKENS):
            break
        slots[slot] = answer = waiting.popleft()
        num_tokens += len(prompts[answer.index])
        chosen.append(slot)
    decoder.add(chosen, [prompts[answer.index] for slot in chosen if (answer := slots[slot])])
    _take(slots, chosen, decoder.tokens[None], stops)


def _take(slots: list[_Answer | None], chosen: Sequence[int], written: Tensor, stops: Collection[int]) -> None:
    """Append the tokens of some steps, [steps, slots], to the answers of some slots; free slots with complete ones."""
    for tokens in written.tolist():
        for slot in chosen:
            if (answer := slots[slot]) is not None:
                answer.take(tokens[slot], stops)
    for slot in chosen:
        if (answer := slots[slot]) is not None and answer.is_complete:
            slots[slot] = None
