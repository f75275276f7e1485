"""Generate answers with transformers' own `generate`, for architectures that our decoder does not support."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList

from tunewell.core.progress import Progress, ProgressListener, silent
from tunewell.inference.decoder import GREEDY, Decoding, Generated, context_limit
from tunewell.model_files.families import DOCUMENTS, table
from tunewell.models.support import fit_packing, stock_mode

_BATCH_TOKENS = 8192
"""Tokens of a batch with complete answers, including padding."""


def generate_with_transformers(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    decoding: Decoding = GREEDY,
    before_token: Callable[[], None] = lambda: None,
    progress: ProgressListener = silent,
) -> list[Generated]:
    """Return one answer per prompt, in the same order. The model's train or eval mode is restored."""
    if not all(prompts):
        raise ValueError("a prompt has no tokens")
    # A prompt that fills the context keeps this empty answer.
    answers = [Generated([], False)] * len(prompts)
    batch_tokens = decoding.batch_tokens or _BATCH_TOKENS
    num_done = 0
    sampling = {"temperature": decoding.temperature, "top_p": decoding.top_p, "top_k": 0}
    settings = GenerationConfig(
        do_sample=decoding.temperature > 0,
        eos_token_id=list(stop_ids) or None,
        pad_token_id=min(stop_ids, default=0),
        use_cache=can_cache(model),
        **(sampling if decoding.temperature > 0 else {}),
    )
    # Sampling has its own random numbers, so that it does not affect training.
    random = torch.random.fork_rng(devices=range(torch.cuda.device_count()))
    with stock_mode(model), _default_generation_config(model), random:
        torch.manual_seed(decoding.seed)
        # Padding changes the answers of some models, and a batch those of others.
        can_pad = fit_packing(model.config, longest=1).level != DOCUMENTS
        batch_tokens = 0 if model.config.model_type in table()["one_by_one"] else batch_tokens
        for batch, num_new in _batches(prompts, max_new_tokens, context_limit(model), batch_tokens, can_pad=can_pad):
            progress(Progress("answers", num_done, len(prompts), "answers"))
            num_done += len(batch)
            settings.max_new_tokens = num_new
            rows = _answer([prompts[index] for index in batch], model, settings, before_token)
            for index, row in zip(batch, rows, strict=True):
                end = next((at for at, token in enumerate(row) if token in stop_ids), None)
                answers[index] = Generated(row[:end], end is not None)
    return answers


def can_cache(model: PreTrainedModel) -> bool:
    """Return whether transformers can generate with a cache of this model. xLSTM's has the wrong shape."""
    return model.config.model_type not in table()["not_cached"]


def _batches(
    prompts: Sequence[Sequence[int]], max_new_tokens: int, limit: int, batch_tokens: int, *, can_pad: bool
) -> Iterator[tuple[list[int], int]]:
    """Yield groups of prompts and their number of new tokens. Prompts near the limit are single.

    The prompts of a group have similar lengths, or equal ones for a model whose answers padding may change.
    """
    group: list[int] = []
    for index in sorted(range(len(prompts)), key=lambda index: len(prompts[index])):
        length = len(prompts[index]) + max_new_tokens
        num_free = limit - len(prompts[index])
        if length > limit:
            if num_free > 0:
                yield [index], num_free
            continue
        is_other = group and not can_pad and len(prompts[group[0]]) != len(prompts[index])
        if group and (is_other or (len(group) + 1) * length > batch_tokens):
            yield group, max_new_tokens
            group = []
        group.append(index)
    if group:
        yield group, max_new_tokens


def _answer(
    prompts: list[Sequence[int]], model: Any, settings: GenerationConfig, before_token: Callable[[], None]
) -> list[list[int]]:
    # Left padding, so that every row continues at its last token.
    pad = partial(pad_sequence, batch_first=True, padding_side="left")
    inputs = pad([torch.tensor(list(prompt)) for prompt in prompts], padding_value=settings.pad_token_id)
    mask = pad([torch.ones(len(prompt), dtype=torch.long) for prompt in prompts])

    def never_stop(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        before_token()  # which may raise
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    criteria: Any = [never_stop]
    written = model.generate(
        inputs=inputs.to(model.device),
        attention_mask=mask.to(model.device),
        generation_config=settings,
        stopping_criteria=StoppingCriteriaList(criteria),
    )
    return written[:, inputs.shape[1] :].tolist()


@contextmanager
def _default_generation_config(model: PreTrainedModel) -> Iterator[None]:
    before = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = before
