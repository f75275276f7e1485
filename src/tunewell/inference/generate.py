"""Generate answers to prompts in batches; batching does not change an answer."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from tunewell.data.tokenizers.load import LoadedTokenizer
from tunewell.inference.decoder import GREEDY, Decoding, decode, decoding_mode, why_not_decoded
from tunewell.models.attention import stock_attention
from tunewell.models.quiet import quiet
from tunewell.records.manifest import Manifest

_BATCH_TOKENS = 8192
"""Tokens of a batch for transformers when its answers are complete, padding included."""


@dataclass(frozen=True)
class Generated:
    """The generated tokens of one answer."""

    ids: list[int]
    """Without the stop token."""
    ended: bool
    """True if the model produced a stop token before the limit."""


def corpus_stop_ids(tokenizer: LoadedTokenizer, manifest: Manifest) -> list[int]:
    """Return the stop tokens of a corpus: the end-of-turn token of each chat template, and the EOS token."""
    return stop_token_ids(tokenizer, (template.end_of_turn for template in manifest.templates))


def stop_token_ids(tokenizer: LoadedTokenizer, ends: Iterable[str]) -> list[int]:
    """Return the ids of the EOS token and of those ends of a turn that are single tokens."""
    texts = {*ends, tokenizer.special_tokens.get("eos_token", "")} - {""}
    return sorted({number for text in texts if (number := tokenizer.backend.token_to_id(text)) is not None})


def shared_prefix_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many items two sequences have in common at their start."""
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
) -> list[Generated]:
    """Return one answer per prompt, in the same order; restore the model's train or eval mode.

    The model's own `generation_config` is ignored, so that sampling settings cannot hide what the model learned.
    `before_token` is called before each token; an exception that it raises stops the generation.
    """
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
        )
    if not all(prompts):
        raise ValueError("a prompt has no tokens")
    with decoding_mode(model):
        found = decode(model, prompts, limits=limits, stop_ids=stop_ids, decoding=decoding, before_token=before_token)
    return [Generated(ids, ended) for ids, ended in found]


def generate_with_transformers(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    decoding: Decoding = GREEDY,
    before_token: Callable[[], None] = lambda: None,
) -> list[Generated]:
    """Do the same with transformers' `generate`: for other architectures, and to check our decoder."""
    if not all(prompts):
        raise ValueError("a prompt has no tokens")
    # A prompt that fills the whole context keeps this empty answer.
    answers = [Generated([], False)] * len(prompts)
    batch_tokens = decoding.batch_tokens or _BATCH_TOKENS
    was_training = model.training
    model.eval()
    try:
        with quiet(), stock_attention(model), _default_generation_config(model), _seeded(decoding.seed):
            for batch, num_new in _batches(prompts, max_new_tokens, context_limit(model), batch_tokens):
                settings = _settings(num_new, stop_ids, decoding)
                rows = _answer([prompts[index] for index in batch], model, settings, before_token)
                for index, row in zip(batch, rows, strict=True):
                    answers[index] = _cut(row, stop_ids)
    finally:
        model.train(was_training)
    return answers


def _batches(
    prompts: Sequence[Sequence[int]], max_new_tokens: int, limit: int, batch_tokens: int
) -> Iterator[tuple[list[int], int]]:
    """Yield groups of prompts of similar length, each with the number of new tokens; one near the limit is alone."""
    group: list[int] = []
    for index in sorted(range(len(prompts)), key=lambda index: len(prompts[index])):
        length = len(prompts[index]) + max_new_tokens
        num_free = limit - len(prompts[index])
        if length > limit:
            if num_free > 0:
                yield [index], num_free
            continue
        if group and (len(group) + 1) * length > batch_tokens:
            yield group, max_new_tokens
            group = []
        group.append(index)
    if group:
        yield group, max_new_tokens


def _answer(
    prompts: list[Sequence[int]], model: Any, settings: GenerationConfig, before_token: Callable[[], None]
) -> list[list[int]]:
    longest = max(len(prompt) for prompt in prompts)
    # Left padding, so that every row continues at its last token.
    padding = [longest - len(prompt) for prompt in prompts]
    ids = [[settings.pad_token_id] * gap + list(prompt) for gap, prompt in zip(padding, prompts, strict=True)]
    mask = [[0] * gap + [1] * (longest - gap) for gap in padding]
    written = model.generate(
        inputs=torch.tensor(ids, device=model.device),
        attention_mask=torch.tensor(mask, device=model.device),
        generation_config=settings,
        stopping_criteria=StoppingCriteriaList([_BeforeToken(before_token)]),
    )
    return written[:, longest:].tolist()


class _BeforeToken(StoppingCriteria):
    """Calls a function before each token, which may raise; never stops by itself."""

    def __init__(self, before_token: Callable[[], None]) -> None:
        self._before_token = before_token

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._before_token()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _settings(num_new: int, stop_ids: Sequence[int], decoding: Decoding) -> GenerationConfig:
    sampling = {"temperature": decoding.temperature, "top_p": decoding.top_p, "top_k": 0}
    return GenerationConfig(
        max_new_tokens=num_new,
        do_sample=decoding.temperature > 0,
        eos_token_id=list(stop_ids) or None,
        pad_token_id=min(stop_ids, default=0),
        use_cache=True,
        **(sampling if decoding.temperature > 0 else {}),
    )


def _cut(row: list[int], stop_ids: Sequence[int]) -> Generated:
    end = next((at for at, token in enumerate(row) if token in stop_ids), None)
    return Generated(row if end is None else row[:end], end is not None)


def context_limit(model: PreTrainedModel) -> int:
    """Return the model's context length in tokens; a huge number if its config sets none."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 62


@contextmanager
def _default_generation_config(model: PreTrainedModel) -> Iterator[None]:
    before = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = before


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the generator and restore it afterwards: sampling during training must not change the training."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield
