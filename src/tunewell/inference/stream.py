"""Let a model answer one prompt token by token, and spell the tokens as they come."""

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

# The tokens of one answer as they come, whatever computes them.

Ended = Literal["end", "length", "context"]
"""Why an answer is over: the model ended it, it has as many tokens as were asked for, or the context is full."""


class Stream(Iterator[int]):
    """The tokens of one answer as they come, without the one that ends it; close it to stop early."""

    def __init__(self, tokens: Iterator[int | Ended]) -> None:
        self._tokens = tokens
        self.ended: Ended | None = None
        """None while it goes on, and when it was stopped."""

    def __next__(self) -> int:
        if self.ended is None:
            found = next(self._tokens)
            if isinstance(found, int):
                return found
            self.ended = found
            self.close()
        raise StopIteration

    def close(self) -> None:
        """Stop, and leave the model as it was; closing twice does no harm."""
        self._tokens.close()  # type: ignore[attr-defined]


_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_NO_CHARACTER = "\ufffd"


def stream(
    model: PreTrainedModel,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    decoding: Decoding = GREEDY,
) -> Stream:
    """Answer a prompt; each token is computed when it is asked for, and is the one that `generate` would give.

    The settings a model's makers recommend are not used. Until the stream is over or closed the model is in eval mode
    and attends as transformers does.
    """
    if not prompt_ids:
        raise ValueError("a prompt has no tokens")
    return Stream(_tokens(model, prompt_ids, max_new_tokens, frozenset(stop_ids), decoding))


def _tokens(
    model: PreTrainedModel, prompt: Sequence[int], max_new_tokens: int, stops: Collection[int], decoding: Decoding
) -> Iterator[int | Ended]:
    room = context_limit(model) - len(prompt)
    was_training = model.training
    model.eval()
    try:
        with quiet(), stock_attention(model):
            choose = _Chooser(decoding, model.device)
            ids, cache = torch.tensor([list(prompt)], device=model.device), None
            for _ in range(min(max_new_tokens, room)):
                logits, cache = _read(model, ids, cache)
                token = choose(logits)
                if token in stops:
                    yield "end"
                    return
                yield token
                ids = torch.tensor([[token]], device=model.device)
        yield "context" if room < max_new_tokens else "length"
    finally:
        model.train(was_training)


@torch.no_grad()
def _read(model: PreTrainedModel, ids: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
    """Read tokens behind those in the cache; give the logits of the next one, and the cache with them in it."""
    # Only the last row of logits is wanted; a head over the whole prompt is most of the work for a small model.
    keep: Any = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    seen: Any = model(input_ids=ids, past_key_values=cache, use_cache=True, return_dict=True, **keep)
    return seen.logits[:, -1].float(), seen.past_key_values


class _Chooser:
    """Takes the likeliest token, or draws one from dice of its own."""

    def __init__(self, decoding: Decoding, device: torch.device) -> None:
        self._dice: torch.Generator | None = None
        self._warpers: list[Any] = []
        if decoding.temperature > 0:
            self._dice = torch.Generator(device).manual_seed(decoding.seed)
            self._warpers.append(TemperatureLogitsWarper(decoding.temperature))
            if decoding.top_p < 1:
                self._warpers.append(TopPLogitsWarper(decoding.top_p))

    def __call__(self, logits: torch.Tensor) -> int:
        if self._dice is None:
            return int(logits.argmax())
        for warp in self._warpers:
            logits = warp(None, logits)
        return int(torch.multinomial(logits.softmax(-1), 1, generator=self._dice))


class Speller:
    """Turns tokens into text as they come; the parts together are the text of all the tokens.

    What cannot be told yet is held back: the first bytes of a character, and a run of tokens that each spell a byte,
    which is a text only when it is whole.
    """

    def __init__(self, backend: Any) -> None:
        """Take the tokenizer itself, `LoadedTokenizer.backend`."""
        self._backend = backend
        self._ids: list[int] = []
        self.text = ""
        """What was given out so far."""

    def add(self, token: int) -> str:
        """Take one more token; give the text that is now certain, which may be none."""
        self._ids.append(token)
        if _BYTE_TOKEN.fullmatch(self._backend.id_to_token(token) or ""):
            return ""
        return self._give(self._spelled().rstrip(_NO_CHARACTER))

    def finish(self) -> str:
        """Give what was held back."""
        return self._give(self._spelled())

    def _spelled(self) -> str:
        return self._backend.decode(self._ids, skip_special_tokens=False)

    def _give(self, certain: str) -> str:
        new = certain[len(self.text) :]
        self.text += new
        return new
