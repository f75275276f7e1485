"""Out of memory: recognise it, free memory, and repeat the step in smaller micro-batches (the OOM ladder)."""

import gc
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from tunewell.core.units import count
from tunewell.hardware.facts import peak_memory_bytes
from tunewell.training.recovery import MemoryLimits

if TYPE_CHECKING:
    from tunewell.training.step import TrainableModel

_FRAGMENTS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "failed to allocate",
    "alloc_failed",
    "cudnn_status_not_supported",
    "invalid buffer size",
)
"""Fragments of the out-of-memory messages of torch's allocators, cuBLAS, cuDNN and Apple's Metal."""
_ENOUGH = 2
"""Steps in a row after which a smaller size stays in force."""


class OutOfMemory(Exception):
    """A step did not fit into memory. Weights and state are unchanged; the step can be repeated."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is, or was caused by, a lack of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError | OutOfMemory):
        return True
    # While CUDA graphs are recorded, only the first error says so; the next ones have it as their context.
    is_caused = isinstance(error.__context__, torch.OutOfMemoryError)
    return isinstance(error, RuntimeError) and (is_caused or any(part in str(error).lower() for part in _FRAGMENTS))


def free_memory(after: BaseException) -> None:
    """Release all unused memory after an error.

    The frames of the error are cleared first. They hold activations and, with torch before 2.13, the hooks of a layer
    that gradient checkpointing was computing, which would stay in force.
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
class OomLadder:
    """What is tried, in this order, when a step runs out of memory. Documents and gradient stay the same.

        halve the largest micro-batch -> ... -> single documents -> gradient checkpointing -> stop

    One long document does not slow down a whole run: the limit stays in force only after two such steps in a row.
    """

    model: "TrainableModel"
    lengths: np.ndarray
    limits: MemoryLimits
    planned_tokens: int
    report: Callable[..., None]
    """Called with an action, a message and the values that stay in force."""
    is_on: bool = True
    """`healing.on`; if not, the first out-of-memory error ends the run."""
    is_always_recomputing: bool = False
    _tokens: int | None = None
    _with_recompute: bool = False

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of a micro-batch in the next attempt."""
        return self._tokens or min(self.planned_tokens, self.limits.micro_batch_tokens or self.planned_tokens)

    def attempt(self) -> AbstractContextManager[None]:
        """Return the context of an attempt: smaller micro-batches have other shapes than the compiled ones."""
        return nullcontext() if self._tokens is None and not self._with_recompute else self.model.uncompiled()

    def step_down(self, groups: Sequence[np.ndarray], error: OutOfMemory) -> None:
        """Take the next rung after a failed attempt; raise OutOfMemory if there is none."""
        self.model.drop_graphs()
        free_memory(error)
        if not self.is_on:
            raise error
        is_recomputing = self._with_recompute or self.limits.is_recomputing or self.is_always_recomputing
        tokens = smaller(groups, self.lengths, is_recomputing=is_recomputing)
        if tokens is not None:
            self._tokens = tokens
            self.report("split", f"out of memory: the step is repeated with {count(tokens)} tokens at once")
        elif not is_recomputing:
            self._with_recompute = True
            self.model.recompute(True)
            self.report("recompute", "out of memory: the step is repeated with gradient checkpointing")
        else:
            longest = max(int(self.lengths[group].max()) for group in groups)
            message = f"out of memory: a single document of {count(longest)} tokens does not fit"
            self.report("stop", message)
            raise OutOfMemory(message) from error

    def finish(self) -> None:
        """Make the smaller size permanent after two steps in a row that needed it; call after each step that fit."""
        limits, is_shrunk = self.limits, self._tokens is not None or self._with_recompute
        limits.num_shrunk = limits.num_shrunk + 1 if is_shrunk else 0
        if limits.num_shrunk >= _ENOUGH:
            limits.num_shrunk = 0
            limits.micro_batch_tokens = self._tokens or limits.micro_batch_tokens
            limits.is_recomputing = limits.is_recomputing or self._with_recompute
            also = ", with gradient checkpointing" if limits.is_recomputing else ""
            tokens = limits.micro_batch_tokens or self.micro_batch_tokens
            self.report(
                "recompute" if self._with_recompute else "split",
                f"from the next step on, {count(tokens)} tokens are computed at once{also}",
                micro_batch_tokens=limits.micro_batch_tokens,
                is_recomputing=limits.is_recomputing,
            )
            self.model.uncompile()  # it is compiled again for the smaller shape
        if self._with_recompute and not limits.is_recomputing:
            self.model.recompute(False)


def smaller(groups: Sequence[np.ndarray], lengths: np.ndarray, *, is_recomputing: bool) -> int | None:
    """Return half the tokens of the largest micro-batch that can be split; None if all are single documents.

    None also if a single document is the largest and gradient checkpointing is off: splitting others is no help then.
    """
    largest = max(groups, key=lambda group: int(lengths[group].sum()), default=np.zeros(0, np.int64))
    can_cut = [group for group in groups if len(group) > 1]
    if not can_cut or (len(largest) == 1 and not is_recomputing):
        return None
    return max(1, max(int(lengths[group].sum()) for group in can_cut) // 2)


def peak_memory(device: torch.device) -> int | None:
    """Return the peak memory of this process on a device; on the CPU of the process, on MPS what is held now."""
    if device.type == "cuda":
        # Reserved, not allocated: the latter does not count what CUDA graphs keep between two steps.
        return torch.cuda.max_memory_reserved(device)
    return torch.mps.driver_allocated_memory() if device.type == "mps" else peak_memory_bytes()
