"""One model, many who ask: answers are written one at a time, first come, first served."""

import asyncio
import threading
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

from tunewell.inference.generate import Decoding


class Spelling(Protocol):
    """Turns tokens into text as they come."""

    def add(self, token: int) -> str:
        """Give the text that is certain now; it may be none."""
        ...

    def finish(self) -> str:
        """Give what was held back."""
        ...


class Tokens(Iterator[int], Protocol):
    """Tokens that are computed when they are asked for."""

    def close(self) -> None:
        """Compute no more of them."""
        ...


class Speaker(Protocol):
    """A model that can be served."""

    @property
    def name(self) -> str:
        """What clients call it."""
        ...

    @property
    def context_length(self) -> int:
        """Tokens of a prompt and its answer together."""
        ...

    def read(self, messages: list[dict[str, str]]) -> list[int]:
        """Make a prompt of messages, as in training; raise UserError for what the template refuses."""
        ...

    def write(self, prompt_ids: Sequence[int], *, max_new_tokens: int, decoding: Decoding) -> Tokens:
        """Write the answer's tokens, without the one that ends it."""
        ...

    def spelling(self) -> Spelling:
        """Begin a new text."""
        ...


@dataclass(frozen=True)
class Order:
    """What is to be written."""

    prompt_ids: list[int]
    max_new_tokens: int
    decoding: Decoding
    stops: tuple[str, ...] = ()


class Answer:
    """An answer while it is written: its text in pieces, and then how it ended."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.num_tokens = 0
        self.is_stopped = False
        """Whether a stop string was met."""
        self.failure: BaseException | None = None
        self._pieces: asyncio.Queue[str | None] = asyncio.Queue()
        self._left = threading.Event()
        self._job: asyncio.Future[None] | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it ended by itself, before its limit."""
        return self.is_stopped or self.num_tokens < self.order.max_new_tokens

    async def pieces(self) -> AsyncIterator[str]:
        """Give the text as it is written; at the end, `failure` is what went wrong, if anything."""
        while (piece := await self._pieces.get()) is not None:
            yield piece

    def leave(self) -> None:
        """Stop writing within a token, or never begin: nobody is listening any more."""
        self._left.set()
        if self._job is not None:
            self._job.cancel()

    def begin(self, speaker: Speaker, worker: ThreadPoolExecutor) -> None:
        """Queue for the model."""
        loop = asyncio.get_running_loop()

        def work() -> None:
            with closing(self._write(speaker)) as pieces:
                for piece in pieces:
                    if self._left.is_set():
                        return
                    if piece:
                        loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

        self._job = loop.run_in_executor(worker, work)
        self._job.add_done_callback(self._end)

    def _end(self, job: "asyncio.Future[None]") -> None:
        self.failure = None if job.cancelled() else job.exception()
        self._pieces.put_nowait(None)

    def _write(self, speaker: Speaker) -> Generator[str]:
        """Give a piece, often an empty one, for every token."""
        order, spelling = self.order, speaker.spelling()
        text = StopText(order.stops)
        tokens = speaker.write(order.prompt_ids, max_new_tokens=order.max_new_tokens, decoding=order.decoding)
        with closing(tokens):
            for token in tokens:
                self.num_tokens += 1
                yield text.add(spelling.add(token))
                if text.is_found:
                    self.is_stopped = True
                    return
        yield text.add(spelling.finish())
        self.is_stopped = text.is_found
        yield text.rest()


class StopText:
    """Text up to the first stop string; what may be the beginning of one is held back until it is known."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.is_found = False
        self._stops = stops
        self._held = ""

    def add(self, text: str) -> str:
        """Give what can be shown now."""
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            shown, self._held, self.is_found = self._held[: min(found)], "", True
            return shown
        keep = max((self._begun(stop) for stop in self._stops), default=0)
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(shown) :]
        return shown

    def rest(self) -> str:
        """Give what was held back: the text has ended."""
        shown, self._held = self._held, ""
        return shown

    def _begun(self, stop: str) -> int:
        """Count the characters at the end of the text that are a beginning of the stop string."""
        longest = min(len(stop) - 1, len(self._held))
        return next((size for size in range(longest, 0, -1) if self._held.endswith(stop[:size])), 0)
