"""Stream the answer to one prompt token by token, and decode the tokens to text as they arrive."""

import inspect
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal

import torch
from transformers import PreTrainedModel
from transformers.generation.logits_process import TemperatureLogitsWarper, TopPLogitsWarper

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
    num_free = context_limit(model) - len(prompt)
    was_training = model.training
    model.eval()
    try:
        with quiet(), stock_attention(model):
            sample = _Sampler(decoding, model.device)
            ids, cache = torch.tensor([list(prompt)], device=model.device), None
            for _ in range(min(max_new_tokens, num_free)):
                logits, cache = _next_logits(model, ids, cache)
                token = sample(logits)
                if token in stops:
                    yield "end"
                    return
                yield token
                ids = torch.tensor([[token]], device=model.device)
        yield "context" if num_free < max_new_tokens else "length"
    finally:
        model.train(was_training)


@torch.no_grad()
def _next_logits(model: PreTrainedModel, ids: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
    """Append tokens to the KV cache; return the logits of the next token and the cache."""
    # Only the last row of logits is needed; the head over a whole prompt is most of the work of a small model.
    keep: Any = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    output: Any = model(input_ids=ids, past_key_values=cache, use_cache=True, return_dict=True, **keep)
    return output.logits[:, -1].float(), output.past_key_values


class _Sampler:
    """Chooses the next token: the most probable one, or a sample from a random generator of its own."""

    def __init__(self, decoding: Decoding, device: torch.device) -> None:
        self._generator: torch.Generator | None = None
        self._warpers: list[Any] = []
        if decoding.temperature > 0:
            self._generator = torch.Generator(device).manual_seed(decoding.seed)
            self._warpers.append(TemperatureLogitsWarper(decoding.temperature))
            if decoding.top_p < 1:
                self._warpers.append(TopPLogitsWarper(decoding.top_p))

    def __call__(self, logits: torch.Tensor) -> int:
        if self._generator is None:
            return int(logits.argmax())
        for warp in self._warpers:
            logits = warp(None, logits)
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
