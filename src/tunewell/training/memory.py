"""When memory does not suffice: know it for what it is, and find what fits."""

import gc
import traceback
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
    """Whether an error says that memory was short, or came of it: graphs that are being recorded say so only first."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError | OutOfMemory):
        return True
    if isinstance(error.__context__, torch.OutOfMemoryError) and isinstance(error, RuntimeError):
        return True
    return isinstance(error, RuntimeError) and any(part in str(error).lower() for part in _FRAGMENTS)


def free_memory(after: BaseException) -> None:
    """Give back what nobody uses after an error, so that the next try has all there is.

    The frames of the error are emptied first: they hold what was computed so far and, with torch before 2.13, the hooks
    of a half-finished layer that is computed twice, which would still be in force.
    """
    error: BaseException | None = after
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
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


def smaller(groups: Sequence[np.ndarray], lengths: np.ndarray, *, is_recomputing: bool) -> int | None:
    """Give half of the largest micro-batch, where cutting can help; None where all are single documents.

    None also where a single document is the largest of all and its layers are not computed twice yet: cutting the
    others would not make that one smaller.
    """
    largest = max(groups, key=lambda group: int(lengths[group].sum()), default=np.zeros(0, np.int64))
    can_cut = [group for group in groups if len(group) > 1]
    if not can_cut or (len(largest) == 1 and not is_recomputing):
        return None
    return max(1, max(int(lengths[group].sum()) for group in can_cut) // 2)
