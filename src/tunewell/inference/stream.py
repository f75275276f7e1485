"""Stream the answer to one prompt token by token, and decode the tokens to text as they arrive."""

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Literal

import torch
from transformers import PreTrainedModel
from transformers.generation.logits_process import TopPLogitsWarper

from tunewell.inference.generate import GREEDY, Decoding, context_limit
from tunewell.models.attention import stock_attention
from tunewell.models.quiet import quiet

Ended = Literal["end", "length", "context"]
"""Why an answer ended: a stop token, the maximum number of new tokens, or a full context."""


class TokenStream(Iterator[int]):
    """The tokens of one answer, without the stop token; each is computed on demand. Close it to stop early."""

    def __init__(self, tokens: Iterator[int | Ended]) -> None:
        self._tokens = tokens
        self.ended: Ended | None = None
        """None while the stream is open, and after it was closed early."""

    def __next__(self) -> int:
        if self.ended is None:
            found = next(self._tokens)
            if isinstance(found, int):
                return found
            self.ended = found
            self.close()
        raise StopIteration

    def close(self) -> None:
        """Stop and restore the model's mode; closing twice is allowed."""
        self._tokens.close()  # type: ignore[attr-defined]


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
    """Stream the answer to a prompt: the same tokens as `generate` returns, computed on demand.

    The model's own `generation_config` is ignored. Until the stream ends or is closed, the model is in eval mode and
    uses the attention of transformers.
    """
    if not prompt_ids:
        raise ValueError("a prompt has no tokens")
    return TokenStream(_tokens(model, prompt_ids, max_new_tokens, frozenset(stop_ids), decoding))


def _tokens(
    model: PreTrainedModel, prompt: Sequence[int], max_new_tokens: int, stops: Collection[int], decoding: Decoding
) -> Iterator[int | Ended]:
    cache: Any = None
    # Only the last row of logits is needed; the head over a whole prompt is most of the work of a small model.
    keep: Any = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}

    @torch.no_grad()
    def next_logits(pending: Sequence[int]) -> torch.Tensor:
        nonlocal cache
        ids: Any = torch.tensor([list(pending)], device=model.device)
        output: Any = model(input_ids=ids, past_key_values=cache, use_cache=True, return_dict=True, **keep)
        cache = output.past_key_values
        return output.logits[:, -1].float()

    num_free = context_limit(model) - len(prompt)
    was_training = model.training
    model.eval()
    try:
        with quiet(), stock_attention(model):
            yield from sample_tokens(next_logits, prompt, decoding, stops, max_new=max_new_tokens, num_free=num_free)
    finally:
        model.train(was_training)


def sample_tokens(
    next_logits: Callable[[Sequence[int]], torch.Tensor],
    prompt: Sequence[int],
    decoding: Decoding,
    stops: Collection[int],
    *,
    max_new: int,
    num_free: int,
) -> Iterator[int | Ended]:
    """Yield the tokens of an answer, then why it ended; `num_free` is the room in the context.

    `next_logits` appends tokens to the KV cache and returns the logits [1, V] of the token after them.
    """
    sample = _Sampler(decoding)
    pending = prompt
    for _ in range(min(max_new, num_free)):
        token = sample(next_logits(pending))
        if token in stops:
            yield "end"
            return
        yield token
        pending = [token]
    yield "context" if num_free < max_new else "length"


class _Sampler:
    """Chooses the next token: the most probable one, or a sample from a random generator of its own."""

    def __init__(self, decoding: Decoding) -> None:
        self._decoding = decoding
        self._generator: torch.Generator | None = None

    def __call__(self, logits: torch.Tensor) -> int:
        temperature, top_p, seed = self._decoding.temperature, self._decoding.top_p, self._decoding.seed
        if temperature <= 0:
            return int(logits.argmax())
        self._generator = self._generator or torch.Generator(logits.device).manual_seed(seed)
        logits = logits / temperature
        if top_p < 1:
            logits = TopPLogitsWarper(top_p)(None, logits)  # type: ignore[arg-type]  it ignores the ids
        return int(torch.multinomial(logits.softmax(-1), 1, generator=self._generator))


class StreamDecoder:
    """Decodes tokens to text as they arrive; the pieces joined are the text of all tokens.

    Text that may still change is held back: the first bytes of a character, and a run of byte tokens, which decode
    only when the run is complete.
    """

    def __init__(self, backend: Any) -> None:
        """Take the tokenizer of the `tokenizers` library, `LoadedTokenizer.backend`."""
        self._backend = backend
        self._ids: list[int] = []
        self.text = ""
        """The text returned so far."""

    def add(self, token: int) -> str:
        """Add a token; return the text that is now final, which may be empty."""
        self._ids.append(token)
        if _BYTE_TOKEN.fullmatch(self._backend.id_to_token(token) or ""):
            return ""
        return self._new_text(self._decoded().rstrip(_REPLACEMENT_CHARACTER))

    def finish(self) -> str:
        """Return the text that was held back."""
        return self._new_text(self._decoded())

    def _decoded(self) -> str:
        return self._backend.decode(self._ids, skip_special_tokens=False)

    def _new_text(self, final: str) -> str:
        new = final[len(self.text) :]
        self.text += new
        return new
