"""Generate completions for many clients, one at a time: a first-in, first-out queue for one model."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

from tunewell.core.errors import UserError
from tunewell.inference.chat_model import ChatModel
from tunewell.inference.decoder import Decoding
from tunewell.inference.prompt import prompt_ids
from tunewell.inference.stream import StreamDecoder, TokenStream

Finish = Literal["stop", "length"]
Turns = list[dict[str, str]]
AddPassages = Callable[[Turns, Callable[[Turns], bool]], tuple[Turns, list[dict[str, Any]], str | None]]
"""Return a conversation with passages in its last question, the sources, and the answer if it is refused."""


@dataclass(frozen=True)
class Prompt:
    """An encoded prompt, with the sources in it."""

    ids: list[int]
    sources: list[dict[str, Any]] | None = None
    """The passages in the prompt; None without an index."""
    refusal: str | None = None
    """The answer to a question that the documents do not answer. Nothing is generated."""


class ServedModel:
    """A chat model with its name in the API; prompts are encoded as in training, answers end at the stop token."""

    def __init__(self, model: ChatModel, name: str, *, add_passages: AddPassages | None = None) -> None:
        """Wrap a model; raise UserError if it has no chat template. `add_passages` adds passages to questions."""
        if model.masker is None:
            raise UserError(
                f"`{name}` cannot be served, because it has no chat template",
                fix="choose a template with `--template`, such as `--template chatml`",
            )
        self.name = name
        self.context_length = model.runtime.context_length
        self._masker = model.masker
        self._model = model
        self._add_passages = add_passages

    def encode(self, messages: list[dict[str, str]], max_new_tokens: int) -> Prompt:
        """Return a prompt; raise UserError if the chat template rejects the messages or no passage fits."""
        if self._add_passages is None:
            return Prompt(self._ids(messages))
        num_free = self.context_length - min(max_new_tokens, self.context_length // 4)
        messages, sources, refusal = self._add_passages(messages, lambda turns: len(self._ids(turns)) <= num_free)
        return Prompt(self._ids(messages), sources, refusal)

    def _ids(self, messages: list[dict[str, str]]) -> list[int]:
        return prompt_ids(self._masker, self._model.encoder, messages)

    def generate(self, prompt_ids: Sequence[int], *, max_new_tokens: int, decoding: Decoding) -> TokenStream:
        """Generate the tokens of an answer, without the stop token."""
        stop_ids = self._model.stop_ids
        return self._model.runtime.stream(
            prompt_ids, max_new_tokens=max_new_tokens, stop_ids=stop_ids, decoding=decoding
        )

    def decoder(self) -> StreamDecoder:
        """Return a text decoder for a new answer."""
        return StreamDecoder(self._model.tokenizer.backend)


class QueuedAnswer:
    """A running generation: the chunks of the answer, then its finish reason."""

    def __init__(self, prompt: Prompt, *, max_new_tokens: int, decoding: Decoding, stops: Sequence[str] = ()) -> None:
        self.prompt_ids, self.sources, self._refusal = prompt.ids, prompt.sources, prompt.refusal
        self._max_new_tokens, self._decoding, self._stops = max_new_tokens, decoding, stops
        self.num_tokens = 0
        self._is_stopped = False
        self.failure: BaseException | None = None
        self._chunks: asyncio.Queue[str | None] = asyncio.Queue()
        self._is_cancelled = threading.Event()
        self._job: asyncio.Future[None] | None = None

    @property
    def finish_reason(self) -> Finish:
        """Whether the answer ended at a stop token or stop string, or at the token limit."""
        return "stop" if self._is_stopped or self.num_tokens < self._max_new_tokens else "length"

    async def chunks(self) -> AsyncIterator[str]:
        """Yield the text while it is generated; afterwards, `failure` is the error or None."""
        while (chunk := await self._chunks.get()) is not None:
            yield chunk

    def cancel(self) -> None:
        """Stop after the current token, or remove the generation from the queue."""
        self._is_cancelled.set()
        if self._job is not None:
            self._job.cancel()

    def start(self, model: ServedModel, worker: ThreadPoolExecutor) -> None:
        """Add the generation to the queue of the worker."""
        loop = asyncio.get_running_loop()

        def work() -> None:
            with closing(self._generate(model)) as chunks:
                for chunk in chunks:
                    if self._is_cancelled.is_set():
                        return
                    if chunk:
                        loop.call_soon_threadsafe(self._chunks.put_nowait, chunk)

        self._job = loop.run_in_executor(worker, work)
        self._job.add_done_callback(self._end)

    def _end(self, job: "asyncio.Future[None]") -> None:
        self.failure = None if job.cancelled() else job.exception()
        self._chunks.put_nowait(None)

    def _generate(self, model: ServedModel) -> Generator[str]:
        """Yield one chunk of text for every token; chunks may be empty."""
        if self._refusal is not None:
            yield self._refusal
            return
        decoder, text = model.decoder(), StopStringFilter(self._stops)
        tokens = model.generate(self.prompt_ids, max_new_tokens=self._max_new_tokens, decoding=self._decoding)
        with closing(tokens):
            for token in tokens:
                self.num_tokens += 1
                yield text.add(decoder.add(token))
                if text.is_found:
                    self._is_stopped = True
                    return
        yield text.add(decoder.finish())
        self._is_stopped = text.is_found
        yield text.finish()


class StopStringFilter:
    """A filter that passes text up to the first stop string, and buffers text that may be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.is_found = False
        self._stops = stops
        self._held = ""

    def add(self, text: str) -> str:
        """Add text, and return the buffered text that cannot be part of a stop string."""
        self._held += text
        found = [index for stop in self._stops if (index := self._held.find(stop)) >= 0]
        if found:
            shown, self._held, self.is_found = self._held[: min(found)], "", True
            return shown
        num_held = max((self._partial_match(stop) for stop in self._stops), default=0)
        shown = self._held[: len(self._held) - num_held]
        self._held = self._held[len(shown) :]
        return shown

    def finish(self) -> str:
        """Return the buffered text at the end of the answer."""
        shown, self._held = self._held, ""
        return shown

    def _partial_match(self, stop: str) -> int:
        """Return the number of characters at the end of the text that are a prefix of the stop string."""
        longest = min(len(stop) - 1, len(self._held))
        return next((size for size in range(longest, 0, -1) if self._held.endswith(stop[:size])), 0)
