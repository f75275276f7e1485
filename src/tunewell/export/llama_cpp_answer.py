"""One answer of a model in llama.cpp: its tokens as they come, why it ended, and how each token is chosen."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

Ended = Literal["end", "length", "context"]
"""Why an answer is over: the model ended it, it has as many tokens as were asked for, or the context is full."""


class Answer(Iterator[int]):
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
        raise StopIteration

    def close(self) -> None:
        """Stop; closing twice does no harm."""
        self._tokens.close()  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Drawing:
    """How a token is chosen: temperature 0 takes the likeliest."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


class Chooser:
    """Takes the likeliest token, or draws one from dice of its own."""

    def __init__(self, drawing: Drawing) -> None:
        self._drawing = drawing
        self._dice = np.random.default_rng(drawing.seed)

    def __call__(self, logits_V: np.ndarray) -> int:
        """Draw among the fewest tokens that together have `top_p` of the chances."""
        temperature, top_p = self._drawing.temperature, self._drawing.top_p
        if temperature <= 0:
            return int(logits_V.argmax())
        scaled_V = np.exp((logits_V.astype(np.float64) - logits_V.max()) / temperature)
        chances_V = scaled_V / scaled_V.sum()
        order_V = np.argsort(-chances_V, kind="stable")
        kept = order_V[: int(np.searchsorted(np.cumsum(chances_V[order_V]), top_p)) + 1]
        return int(self._dice.choice(kept, p=chances_V[kept] / chances_V[kept].sum()))
