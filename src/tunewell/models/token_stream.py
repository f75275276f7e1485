"""The tokens of one answer as they come, whatever computes them."""

from collections.abc import Iterator
from typing import Literal

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
