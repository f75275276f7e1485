"""How each token of an answer is chosen in llama.cpp."""

from dataclasses import dataclass

import numpy as np


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
