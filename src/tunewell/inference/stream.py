"""Stream the answer to one prompt token by token, and decode the tokens to text."""

import inspect
import re
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from tunewell.inference.decoder import (
    GREEDY,
    MIN_GRAPH_STEPS,
    Decoder,
    Decoding,
    Sampler,
    can_skip_logits,
    context_limit,
    decoding_mode,
    why_not_decoded,
)
from tunewell.inference.transformers_generate import can_cache
from tunewell.models.states import has_states
from tunewell.models.support import stock_mode

Ended = Literal["end", "length", "context"]
"""Why an answer ended: a stop token, the maximum number of new tokens, or a full context."""
Tokens = Generator[int, None, Ended | None]
"""The tokens of an answer; the generator returns why it ended."""


@dataclass(eq=False)
class TokenStream(Iterator[int]):
    """The tokens of one answer, without the stop token, computed on demand. Close the stream to stop early."""

    _tokens: Tokens
    ended: Ended | None = None
    """Why the answer ended; None while the stream is open or if it was closed early."""

    def __next__(self) -> int:
        try:
            return next(self._tokens)
        except StopIteration as end:
            self.ended = self.ended or end.value
            raise

    def close(self) -> None:
        """Stop, and restore the model's mode. Closing twice is allowed."""
        self._tokens.close()


_CACHES = ("past_key_values", "cache_params", "state")
"""How transformers' models name their cache, in their arguments and their output."""
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT_CHARACTER = "\ufffd"


def stream_tokens(
    model: PreTrainedModel,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    decoding: Decoding = GREEDY,
) -> TokenStream:
    """Stream the answer to a prompt, computed on demand. The tokens are the same as those from `generate`.

    The model's `generation_config` is ignored. Until the stream ends or is closed, the model is in eval mode and uses
    a different attention implementation than in training.
    """
    if not prompt_ids:
        raise ValueError("a prompt has no tokens")
    return TokenStream(_tokens(model, prompt_ids, max_new_tokens, frozenset(stop_ids), decoding))


def _tokens(
    model: PreTrainedModel, prompt: Sequence[int], max_new_tokens: int, stops: Collection[int], decoding: Decoding
) -> Tokens:
    num_free = context_limit(model) - len(prompt)
    capacity = len(prompt) + max(0, min(max_new_tokens, num_free))
    is_decoded = why_not_decoded(model, capacity) is None
    with decoding_mode(model) if is_decoded else stock_mode(model):
        next_logits = _decoder_logits(model, capacity) if is_decoded else _stock_logits(model)
        tokens = sample_tokens(next_logits, prompt, decoding, stops, max_new=max_new_tokens, num_free=num_free)
        return (yield from tokens)


def _decoder_logits(model: PreTrainedModel, capacity: int) -> Callable[[Sequence[int]], torch.Tensor]:
    """Return `next_logits` for `sample_tokens`. The first call takes the prompt, later calls take one token."""
    decoder = Decoder(model, num_slots=1, capacity=capacity)
    num_cached = 0

    def next_logits(pending: Sequence[int]) -> torch.Tensor:
        nonlocal num_cached
        if num_cached == 0:
            decoder.add([0], [pending])
        else:
            if capacity - num_cached >= MIN_GRAPH_STEPS:
                decoder.record()
            decoder.show(num_cached + 1)
            decoder.tokens.fill_(pending[0])
            decoder.step()
        num_cached += len(pending)
        return decoder.logits.float()

    return next_logits


def _stock_logits(model: PreTrainedModel) -> Callable[[Sequence[int]], torch.Tensor]:
    """Return `next_logits` for `sample_tokens`, with transformers' own cache, or without one if it keeps none."""
    cache: dict[str, Any] = {}
    read: list[int] = []
    # Only the last row of logits is needed; in a small model, most of the work is the head over the whole prompt.
    keep: Any = {"logits_to_keep": 1} if can_skip_logits(model) else {}
    is_cached = can_cache(model)
    needs_places = has_states(model) and "position_ids" in inspect.signature(model.forward).parameters

    @torch.no_grad()
    def next_logits(pending: Sequence[int]) -> torch.Tensor:
        read.extend(pending)
        ids: Any = torch.tensor([list(pending) if cache else read], device=model.device)
        # A hybrid model asks its first layer for the length of its cache, which may have none.
        places = torch.arange(len(read) - ids.shape[1], len(read), device=model.device)[None]
        where = {"position_ids": places} if needs_places else {}
        output: Any = model(input_ids=ids, use_cache=is_cached, return_dict=True, **cache, **where, **keep)
        cache.update({name: value for name in _CACHES if (value := getattr(output, name, None)) is not None})
        return output.logits[:, -1].float()

    return next_logits


def sample_tokens(
    next_logits: Callable[[Sequence[int]], torch.Tensor],
    prompt: Sequence[int],
    decoding: Decoding,
    stops: Collection[int],
    *,
    max_new: int,
    num_free: int,
) -> Tokens:
    """Yield the tokens of an answer, and return why it ended. `num_free` is the number of free tokens in the context.

    `next_logits` appends tokens to the KV cache and returns the logits [1, V] for the next token.
    """
    sample = Sampler(decoding)
    pending = prompt
    for _ in range(min(max_new, num_free)):
        token = int(sample(next_logits(pending)))
        if token in stops:
            return "end"
        yield token
        pending = [token]
    return "context" if num_free < max_new else "length"


class StreamDecoder:
    """Decodes tokens to text as they arrive. The returned pieces, concatenated, are the text of all tokens.

    Text that may still change is held back: incomplete characters, and a run of byte tokens, which can be decoded only
    when the run is complete.
    """

    def __init__(self, backend: Any) -> None:
        """Decode with a tokenizer of the `tokenizers` library (`LoadedTokenizer.backend`)."""
        self._backend = backend
        self._ids: list[int] = []
        self.text = ""
        """The text returned so far."""

    def add(self, token: int) -> str:
        """Add a token, and return the text that is now final, which may be empty."""
        self._ids.append(token)
        if _BYTE_TOKEN.fullmatch(self._backend.id_to_token(token) or ""):
            return ""
        return self._new_text(self._decoded().rstrip(_REPLACEMENT_CHARACTER))

    def finish(self) -> str:
        """Return the text that is still held back."""
        return self._new_text(self._decoded())

    def _decoded(self) -> str:
        return self._backend.decode(self._ids, skip_special_tokens=False)

    def _new_text(self, final: str) -> str:
        new = final[len(self.text) :]
        self.text += new
        return new
