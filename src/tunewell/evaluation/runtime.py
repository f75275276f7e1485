"""What computes a model that is spoken to or judged: torch, or whatever else gives the same few numbers."""

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedModel

from tunewell.core.errors import UserError
from tunewell.evaluation.measuring import answer_all, bad_weights, measure_losses, next_logits
from tunewell.models.generate import GREEDY, Decoding, Generated, context_limit
from tunewell.models.streaming import stream
from tunewell.models.support import head_facts
from tunewell.models.token_stream import Stream
from tunewell.training.batches import Documents
from tunewell.training.loss import HeadShape
from tunewell.training.reading import Reader

Progress = Callable[[int, int], None]
Losses = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.int64]]
"""Documents, the loss of each summed over its supervised tokens, and how many those are."""


class Runtime(Protocol):
    """A model at work. One text at a time: a stream ends, or is closed, before anything else is asked."""

    @property
    def context_length(self) -> int:
        """Tokens of a prompt and its answer together."""
        ...

    def stream(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int, stop_ids: Collection[int], decoding: Decoding = GREEDY
    ) -> Stream:
        """Answer a prompt; each token is computed when it is asked for."""
        ...

    def answer_all(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int],
        pad_id: int,
        batch_size: int | None = None,
    ) -> list[Generated]:
        """Answer prompts greedily, each as if it were asked alone."""
        ...

    def next_logits(self, prompts: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
        """Give the logits of what would come after each prompt."""
        ...

    def losses(self, split: Documents, *, most: int | None, progress: Progress = ...) -> Losses:
        """Give the loss of some documents of a split, spread evenly, each as if it were read alone."""
        ...

    def bad_weights(self) -> dict[str, int]:
        """Name the tensors with values that are not finite, and count those."""
        ...

    def close(self) -> None:
        """Let go of what Python does not free by itself; closing twice does no harm."""
        ...


class TorchRuntime:
    """A model of transformers, computed by torch on its device."""

    def __init__(self, model: PreTrainedModel, precision: str) -> None:
        self.model = model
        self._precision = precision
        self._head: HeadShape | None = None

    @property
    def context_length(self) -> int:
        """Tokens of a prompt and its answer together; a number beyond all use where the model sets none."""
        return context_limit(self.model)

    def stream(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int, stop_ids: Collection[int], decoding: Decoding = GREEDY
    ) -> Stream:
        """Answer a prompt; each token is the one that `transformers.generate` would give."""
        return stream(self.model, prompt_ids, max_new_tokens=max_new_tokens, stop_ids=stop_ids, decoding=decoding)

    def answer_all(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int],
        pad_id: int,
        batch_size: int | None = None,
    ) -> list[Generated]:
        """Answer prompts greedily, in batches."""
        return answer_all(
            self.model,
            prompts,
            max_new_tokens=max_new_tokens,
            stop_ids=stop_ids,
            pad_id=pad_id,
            batch_size=batch_size,
        )

    def next_logits(self, prompts: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
        """Give the logits of what would come after each prompt, read alone."""
        return next_logits(self.model, prompts)

    def losses(self, split: Documents, *, most: int | None, progress: Progress = lambda done, of: None) -> Losses:
        """Give the loss of some documents of a split, several laid end to end and read at once."""
        head = self._head or self._head_for(split.arrays(0)[0].tolist())
        self._head = head
        reader = Reader(self.model, self._precision, int(split.index["length"].max()), head=head)
        found = measure_losses(reader, split, most=most, progress=progress)
        return found.documents, found.sums, found.tokens

    def bad_weights(self) -> dict[str, int]:
        """Look at every weight."""
        return bad_weights(self.model)

    def close(self) -> None:
        """Do nothing: torch frees the weights when nobody has the model any more."""

    def _head_for(self, text: list[int]) -> HeadShape:
        try:
            facts = head_facts(self.model)
        except UserError:
            # A head that overflows looks like one that is not known; its losses will say so.
            if np.isfinite(next_logits(self.model, [text])).all():
                raise
            return HeadShape()
        return HeadShape(facts.softcap, facts.scale)
