"""When memory does not suffice: know it for what it is, and find what fits."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

_FRAGMENTS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "failed to allocate",
    "alloc_failed",
    "cudnn_status_not_supported",
    "invalid buffer size",
)
"""What the parts of torch say when memory is short: its allocators, cuBLAS, cuDNN, Apple's Metal."""
_ENOUGH = 2
"""Steps in a row that must be cut smaller until all that follow are: one long document does not slow a whole run."""


class OutOfMemory(Exception):
    """A step did not fit into memory; nothing of it was kept, and it can be taken again."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory was short."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError | OutOfMemory):
        return True
    return isinstance(error, RuntimeError) and any(part in str(error).lower() for part in _FRAGMENTS)


def free_memory() -> None:
    """Give back what nobody uses, so that the next try has all there is."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()


@dataclass
class Fitting:
    """How many tokens are computed at once, after what memory has shown."""

    limit: int | None = None
    """Tokens that are never exceeded any more; None where the planned number fits."""
    is_recomputing: bool = False
    """Whether layers are computed again on the way back, for good."""
    look_limit: int | None = None
    """Held-out tokens that are read at once, where more did not fit."""
    answer_limit: int | None = None
    """Tokens of held-out questions that are answered at once, where more did not fit."""
    _in_a_row: int = 0

    def budget(self, planned: int) -> int:
        """Give the tokens of a micro-batch."""
        return planned if self.limit is None else min(planned, self.limit)

    def went(self, budget: int | None, *, with_recompute: bool) -> bool:
        """Learn how a step went: `budget` is what it had to be cut to, None where it fit as planned.

        Says whether that has become the rule just now.
        """
        if budget is None and not with_recompute:
            self._in_a_row = 0
            return False
        self._in_a_row += 1
        if self._in_a_row < _ENOUGH:
            return False
        self._in_a_row = 0
        if budget is not None:
            self.limit = budget
        self.is_recomputing = self.is_recomputing or with_recompute
        return True


def smaller(groups: Sequence[np.ndarray], lengths: np.ndarray) -> int | None:
    """Give half of the largest micro-batch that can be cut; None where all are single documents."""
    sizes = [int(lengths[group].sum()) for group in groups if len(group) > 1]
    largest = max((int(lengths[group].sum()) for group in groups), default=0)
    return max(1, largest // 2) if sizes else None
