"""The sampling settings of a conversation, with a loaded model or a server. No torch."""

import math
from dataclasses import dataclass

from tunewell.core.errors import UserError

_MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class ChatOptions:
    """The sampling settings of a conversation. Invalid values raise UserError."""

    temperature: float = 0.0
    """0 is greedy decoding."""
    length: int = 512
    """Maximum number of tokens in an answer."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise UserError(
                f"the temperature cannot be {self.temperature}",
                fix="use 0 (greedy) or more; 1 samples with the model's own probabilities",
            )
        if self.length < 1:
            raise UserError(f"an answer cannot have {self.length} tokens", fix="use at least 1")
        if not 0 <= self.seed <= _MAX_SEED:
            raise UserError(f"the seed cannot be {self.seed}", fix="use a whole number of at least 0")
