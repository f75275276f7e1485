"""Generate completions one at a time for many clients: a queue in front of one model, first come, first served."""

import asyncio
import threading
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

from tunewell.inference.generate import Decoding


class TextDecoder(Protocol):
    """Decodes a stream of tokens to text."""

    def add(self, token: int) -> str:
        """Return the text that is complete with this token; often empty."""
        ...

    def finish(self) -> str:
        """Return the text that was held back."""
        ...


class TokenStream(Iterator[int], Protocol):
    """Tokens that are generated on demand."""

    def close(self) -> None:
        """Stop generating."""
        ...


class ServedModel(Protocol):
    """A model that can be served."""

    @property
    def name(self) -> str:
        """The model's name in the API."""
        ...

    @property
    def context_length(self) -> int:
        """Maximum tokens of a prompt and its answer together."""
        ...

    def encode(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the token ids of a prompt, as in training; raise UserError if the chat template rejects it."""
        ...

    def generate(self, prompt_ids: Sequence[int], *, max_new_tokens: int, decoding: Decoding) -> TokenStream:
        """Generate the tokens of an answer, without the stop token."""
        ...

    def decoder(self) -> TextDecoder:
        """Return a decoder for a new answer."""
        ...


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt and how to continue it."""

    prompt_ids: list[int]
    max_new_tokens: int
    decoding: Decoding
    stops: tuple[str, ...] = ()


class Generation:
    """An answer while it is generated: chunks of text, then the reason why it ended."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.num_tokens = 0
        self.is_stopped = False
        """Whether a stop string ended the text."""
        self.failure: BaseException | None = None
        self._chunks: asyncio.Queue[str | None] = asyncio.Queue()
        self._is_cancelled = threading.Event()
        self._job: asyncio.Future[None] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the answer ended before its token limit."""
        return self.is_stopped or self.num_tokens < self.request.max_new_tokens

    async def chunks(self) -> AsyncIterator[str]:
        """Yield the text as it is generated; afterwards `failure` holds the error, if there was one."""
        while (chunk := await self._chunks.get()) is not None:
            yield chunk

    def cancel(self) -> None:
        """Stop after the current token, or leave the queue, because the client has disconnected."""
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
        """Yield one chunk of text for every token; many are empty."""
        request, decoder = self.request, model.decoder()
        text = StopStringFilter(request.stops)
        tokens = model.generate(request.prompt_ids, max_new_tokens=request.max_new_tokens, decoding=request.decoding)
        with closing(tokens):
            for token in tokens:
                self.num_tokens += 1
                yield text.add(decoder.add(token))
                if text.is_found:
                    self.is_stopped = True
                    return
        yield text.add(decoder.finish())
        self.is_stopped = text.is_found
        yield text.finish()


class StopStringFilter:
    """Passes text through up to the first stop string; holds back text that may be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.is_found = False
        self._stops = stops
        self._held = ""

    def add(self, text: str) -> str:
        """Return the text that certainly precedes any stop string."""
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
        """Return the text that was held back, at the end of the answer."""
        shown, self._held = self._held, ""
        return shown

    def _partial_match(self, stop: str) -> int:
        """Return how many characters at the end of the text are a prefix of the stop string."""
        longest = min(len(stop) - 1, len(self._held))
        return next((size for size in range(longest, 0, -1) if self._held.endswith(stop[:size])), 0)
