"""Let a model answer prompts: in batches, with a cache, and each as if it were asked alone."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from tunewell.models.attention import stock_attention
from tunewell.models.quiet import quiet
from tunewell.records.manifest import Manifest


@dataclass(frozen=True)
class Generated:
    """What a model wrote."""

    ids: list[int]
    """Without the id that ended it."""
    ended: bool
    """Whether it ended by itself, before the limit."""


@dataclass(frozen=True)
class Decoding:
    """How the next token is chosen, and how many prompts are answered at once."""

    temperature: float = 0.0
    """0 takes the likeliest token; above, one is drawn."""
    top_p: float = 1.0
    """Only the likeliest tokens that together have this probability are drawn from."""
    seed: int = 0
    batch_tokens: int = 8192
    """Tokens of one batch at its end, padding included."""


GREEDY = Decoding()


class Tokens(Protocol):
    """What is asked of a tokenizer here: `data.tokenizer.LoadedTokenizer` has it."""

    @property
    def backend(self) -> Any:
        """Give the tokenizer itself, which turns a token into its id."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Name the special tokens: `eos_token` and others."""
        ...


def stop_ids_of(tokenizer: Tokens, manifest: Manifest) -> list[int]:
    """List the ids at which an answer ends: what the corpus's templates end a turn with, and the end of a text."""
    texts = [template.end_of_turn for template in manifest.templates]
    texts.append(tokenizer.special_tokens.get("eos_token", ""))
    found = (tokenizer.backend.token_to_id(text) for text in texts if text)
    return sorted({number for number in found if number is not None})


def generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    pad_id: int,
    decoding: Decoding = GREEDY,
    before_token: Callable[[], None] = lambda: None,
) -> list[Generated]:
    """Answer each prompt, in the order given; the model is left in the mode it was in.

    The settings a model's makers recommend for sampling are not used: what is seen is what it learned. What
    `before_token` raises ends it.
    """
    if not all(prompts):
        raise ValueError("a prompt has no tokens")
    # What a prompt that fills the whole context gets.
    answers = [Generated([], False)] * len(prompts)
    was_training = model.training
    model.eval()
    try:
        with quiet(), stock_attention(model), _without_own_settings(model), _seeded(decoding.seed):
            for batch, room in _batches(prompts, max_new_tokens, context_limit(model), decoding.batch_tokens):
                settings = _settings(room, stop_ids, pad_id, decoding)
                rows = _answer([prompts[index] for index in batch], model, settings, before_token)
                for index, row in zip(batch, rows, strict=True):
                    answers[index] = _cut(row, stop_ids)
    finally:
        model.train(was_training)
    return answers


def _batches(
    prompts: Sequence[Sequence[int]], max_new_tokens: int, limit: int, batch_tokens: int
) -> Iterator[tuple[list[int], int]]:
    """Group prompts of like length, each group with the tokens it may write; one near the model's limit stays alone."""
    waiting: list[int] = []
    for index in sorted(range(len(prompts)), key=lambda index: len(prompts[index])):
        length = len(prompts[index]) + max_new_tokens
        room = limit - len(prompts[index])
        if length > limit:
            if room > 0:
                yield [index], room
            continue
        if waiting and (len(waiting) + 1) * length > batch_tokens:
            yield waiting, max_new_tokens
            waiting = []
        waiting.append(index)
    if waiting:
        yield waiting, max_new_tokens


def _answer(
    prompts: list[Sequence[int]], model: Any, settings: GenerationConfig, before_token: Callable[[], None]
) -> list[list[int]]:
    longest = max(len(prompt) for prompt in prompts)
    # On the left, so that every row goes on at its own end.
    padding = [longest - len(prompt) for prompt in prompts]
    ids = [[settings.pad_token_id] * gap + list(prompt) for gap, prompt in zip(padding, prompts, strict=True)]
    mask = [[0] * gap + [1] * (longest - gap) for gap in padding]
    written = model.generate(
        inputs=torch.tensor(ids, device=model.device),
        attention_mask=torch.tensor(mask, device=model.device),
        generation_config=settings,
        stopping_criteria=StoppingCriteriaList([_Ask(before_token)]),
    )
    return written[:, longest:].tolist()


class _Ask(StoppingCriteria):
    """Ask somebody whether to go on, who may raise; by itself it stops nothing."""

    def __init__(self, before_token: Callable[[], None]) -> None:
        self._before_token = before_token

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._before_token()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _settings(room: int, stop_ids: Sequence[int], pad_id: int, decoding: Decoding) -> GenerationConfig:
    draws = {"temperature": decoding.temperature, "top_p": decoding.top_p, "top_k": 0}
    return GenerationConfig(
        max_new_tokens=room,
        do_sample=decoding.temperature > 0,
        eos_token_id=list(stop_ids) or None,
        pad_token_id=pad_id,
        use_cache=True,
        **(draws if decoding.temperature > 0 else {}),
    )


def _cut(row: list[int], stop_ids: Sequence[int]) -> Generated:
    end = next((at for at, token in enumerate(row) if token in stop_ids), None)
    return Generated(row if end is None else row[:end], end is not None)


def context_limit(model: PreTrainedModel) -> int:
    """Say how many tokens a model reads and writes at most; a number beyond all use where it sets none."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 62


@contextmanager
def _without_own_settings(model: PreTrainedModel) -> Iterator[None]:
    before = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = before


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Draw from a seed of one's own: what is trained next must not depend on what was asked."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield
