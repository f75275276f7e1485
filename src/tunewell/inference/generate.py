"""Generate answers to prompts in batches (continuous batching). Batching does not change an answer.

When an answer is complete, its slot in the decoder takes the next prompt. On a GPU, the host reads the tokens only
every few steps, so that it rarely waits for the GPU.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tunewell.core.progress import Progress, ProgressListener, silent
from tunewell.inference.decoder import (
    GREEDY,
    MIN_GRAPH_STEPS,
    Decoder,
    Decoding,
    Generated,
    context_limit,
    decoding_mode,
    why_not_decoded,
)
from tunewell.inference.transformers_generate import generate_with_transformers
from tunewell.models.attention import head_size
from tunewell.models.fp32_modules import compute_dtype

_PROMPT_TOKENS = 8192
"""Maximum prompt tokens in one forward pass."""
_MAX_GPU_SLOTS, _MAX_CPU_SLOTS = 256, 32
_CPU_TOKENS = 32768
"""Maximum tokens of all slots on a CPU, where larger batches are not faster."""
_MEMORY_SHARE = 0.5
"""Share of the free GPU memory that the KV cache may use."""
_READ_EVERY = 8
"""On a GPU, the host reads the tokens after this many steps."""


def shared_prefix_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the common prefix of two sequences."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (left, right) in pairs if left != right), min(len(one), len(other)))


def generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    decoding: Decoding = GREEDY,
    before_token: Callable[[], None] = lambda: None,
    progress: ProgressListener = silent,
) -> list[Generated]:
    """Return one answer per prompt, in the same order. The model's train or eval mode is restored.

    The model's `generation_config` is ignored, so that its sampling settings cannot hide what the model learned.
    `before_token` is called before each token; it may raise an exception to stop the generation.
    """
    if not all(prompts):
        raise ValueError("a prompt has no tokens")
    limits = [max(0, min(max_new_tokens, context_limit(model) - len(prompt))) for prompt in prompts]
    longest = max((len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True)), default=0)
    if why_not_decoded(model, longest) is not None:
        return generate_with_transformers(
            model,
            prompts,
            max_new_tokens=max_new_tokens,
            stop_ids=stop_ids,
            decoding=decoding,
            before_token=before_token,
            progress=progress,
        )
    answers = [_Answer(prompt, limit) for prompt, limit in zip(prompts, limits, strict=True)]

    def step() -> None:
        before_token()
        progress(Progress("answers", sum(answer.is_complete for answer in answers), len(answers), "answers"))

    with decoding_mode(model):
        num_slots = _num_slots(model, longest, decoding)
        while unfinished := [answer for answer in answers if not answer.is_complete]:
            try:
                capacity = max(len(answer.prompt) + answer.limit for answer in unfinished)
                num_used = min(len(unfinished), num_slots)
                _decode(
                    Decoder(model, num_slots=num_used, capacity=capacity, decoding=decoding), unfinished, stop_ids, step
                )
            except torch.OutOfMemoryError:
                if num_slots == 1 or decoding.batch_tokens is not None:
                    raise
                num_slots //= 2
                for answer in unfinished:
                    if not answer.is_complete:
                        answer.ids.clear()
                torch.cuda.empty_cache()
    return [Generated(answer.ids, answer.ended) for answer in answers]


@dataclass
class _Answer:
    """An answer that is being generated."""

    prompt: Sequence[int]
    limit: int
    ids: list[int] = field(default_factory=list)
    ended: bool = False

    @property
    def is_complete(self) -> bool:
        return self.ended or len(self.ids) == self.limit


_Slots = list[_Answer | None]


def _decode(decoder: Decoder, answers: list[_Answer], stops: Collection[int], before_token: Callable[[], None]) -> None:
    """Generate the answers, as many at a time as the decoder has slots."""
    waiting = deque(sorted(answers, key=lambda answer: len(answer.prompt)))
    slots: _Slots = [None] * decoder.cache.num_slots
    is_gpu = decoder.device.type == "cuda"
    while waiting or any(slots):
        if waiting and None in slots:
            before_token()
            _fill(decoder, slots, waiting, stops)
            continue
        active = [slot for slot, answer in enumerate(slots) if answer]
        if len(active) <= len(slots) // 2 and not is_gpu:
            decoder.keep(active)
            slots = [slots[slot] for slot in active]
        remaining = max(answer.limit - len(answer.ids) for answer in slots if answer)
        if remaining >= MIN_GRAPH_STEPS:
            decoder.record()
        num_steps = min(_READ_EVERY if is_gpu else 1, remaining)
        longest = max(len(answer.prompt) + len(answer.ids) for answer in slots if answer)
        decoder.show(longest + num_steps - 1)
        written = []
        for _ in range(num_steps):
            before_token()
            decoder.step()
            written.append(decoder.tokens.clone())
        _take(slots, range(len(slots)), torch.stack(written), stops)


def _fill(decoder: Decoder, slots: _Slots, waiting: deque[_Answer], stops: Collection[int]) -> None:
    """Add as many waiting prompts to free slots as fit in one forward pass, and take their first tokens."""
    chosen: dict[int, Sequence[int]] = {}
    num_tokens = 0
    for slot in [slot for slot, answer in enumerate(slots) if answer is None]:
        if not waiting or (chosen and num_tokens + len(waiting[0].prompt) > _PROMPT_TOKENS):
            break
        slots[slot] = answer = waiting.popleft()
        chosen[slot] = answer.prompt
        num_tokens += len(answer.prompt)
    decoder.add([*chosen], [*chosen.values()])
    _take(slots, chosen, decoder.tokens[None], stops)


def _take(slots: _Slots, chosen: Iterable[int], written: Tensor, stops: Collection[int]) -> None:
    """Append the tokens [steps, slots] to the answers in the chosen slots, and free the slots of complete answers."""
    tokens_of = written.T.tolist()
    for slot in chosen:
        if (answer := slots[slot]) is None:
            continue
        for token in tokens_of[slot]:
            if token in stops:
                answer.ended = True
            else:
                answer.ids.append(token)
            if answer.is_complete:
                slots[slot] = None
                break


def _num_slots(model: PreTrainedModel, capacity: int, decoding: Decoding) -> int:
    """Return how many answers are decoded together, limited by the memory of the KV cache and by `batch_tokens`."""
    if model.device.type == "cuda":
        config = model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        token_bytes = 2 * config.num_hidden_layers * heads * head_size(config) * compute_dtype(model).itemsize
        free, _ = torch.cuda.mem_get_info(model.device)
        free += torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
        number = min(_MAX_GPU_SLOTS, int(free * _MEMORY_SHARE) // max(1, token_bytes * capacity))
    else:
        number = min(_MAX_CPU_SLOTS, _CPU_TOKENS // max(1, capacity))
    if decoding.batch_tokens is not None:
        number = min(number, decoding.batch_tokens // max(1, capacity))
    return max(1, number)
