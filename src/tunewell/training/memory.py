"""Out of memory (OOM): repeat the step with smaller micro-batches (the OOM ladder). Also `PinnedMemory`."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tunewell.core.units import count
from tunewell.machine.facts import peak_memory_bytes
from tunewell.machine.out_of_memory import OutOfMemory, free_memory

if TYPE_CHECKING:
    from tunewell.training.run import Run

_ALIGNMENT = 64
_BLOCK_BYTES = 256 << 20
_ENOUGH = 2
"""A smaller micro-batch size becomes permanent after this many consecutive steps that needed it."""


@dataclass
class OomLadder:
    """The remedies for a step that runs out of memory, tried in this order. They do not change the gradient.

        halve the largest micro-batch -> ... -> single documents -> gradient checkpointing -> stop

    One long document does not slow down the whole run: a limit becomes permanent only after two such steps in a row.
    """

    run: "Run"
    tokens: int
    """Tokens per micro-batch in the next attempt."""
    report: Callable[..., None]
    """Called with an action, a message and the new permanent limits."""
    is_split: bool = False
    with_recompute: bool = False

    def attempt(self) -> AbstractContextManager[None]:
        """Return the context for an attempt. Smaller micro-batches run uncompiled, because their shapes differ."""
        return self.run.learner.uncompiled() if self.is_split or self.with_recompute else nullcontext()

    def step_down(self, groups: Sequence[np.ndarray], error: OutOfMemory) -> None:
        """Select the next remedy after a failed attempt. Raise OutOfMemory if no remedy is left."""
        run, lengths = self.run, self.run.order.lengths
        run.learner.drop_graphs()
        free_memory(error)
        if not run.config.healing.on:
            raise error
        is_always_recomputing = run.healing.limits.is_recomputing or run.config.train.recompute != "off"
        is_recomputing = self.with_recompute or is_always_recomputing
        tokens = smaller(groups, lengths, is_recomputing=is_recomputing)
        if tokens is not None:
            self.tokens, self.is_split = tokens, True
            self.report("split", f"out of memory: the step is repeated with {count(tokens)} tokens at once")
        elif not is_recomputing:
            self.with_recompute = True
            run.learner.recompute("on")
            self.report("recompute", "out of memory: the step is repeated with gradient checkpointing")
        else:
            longest = max(int(lengths[group].max()) for group in groups)
            message = f"out of memory: a single document of {count(longest)} tokens does not fit"
            self.report("stop", message)
            raise OutOfMemory(message) from error

    def finish(self) -> None:
        """Make a smaller size permanent after two steps in a row that needed it. Called after each successful step."""
        learner, limits = self.run.learner, self.run.healing.limits
        limits.num_shrunk = limits.num_shrunk + 1 if self.is_split or self.with_recompute else 0
        if limits.num_shrunk >= _ENOUGH:
            limits.num_shrunk = 0
            limits.micro_batch_tokens = self.tokens if self.is_split else limits.micro_batch_tokens
            limits.is_recomputing = limits.is_recomputing or self.with_recompute
            tokens = limits.micro_batch_tokens or self.tokens
            also = ", with gradient checkpointing" if limits.is_recomputing else ""
            self.report(
                "recompute" if self.with_recompute else "split",
                f"from the next step on, {count(tokens)} tokens are computed at once{also}",
                micro_batch_tokens=limits.micro_batch_tokens,
                is_recomputing=limits.is_recomputing,
            )
            learner.uncompile()  # the model is compiled again for the smaller shape
        if self.with_recompute and not limits.is_recomputing:
            learner.recompute("off")


def smaller(groups: Sequence[np.ndarray], lengths: np.ndarray, *, is_recomputing: bool) -> int | None:
    """Return half the tokens of the largest micro-batch that can be split, or None if splitting cannot help.

    Splitting cannot help if every micro-batch is a single document. If only the largest one is, gradient checkpointing
    is tried first.
    """
    largest = max(groups, key=lambda group: int(lengths[group].sum()), default=np.zeros(0, np.int64))
    can_cut = [group for group in groups if len(group) > 1]
    if not can_cut or (len(largest) == 1 and not is_recomputing):
        return None
    return max(1, max(int(lengths[group].sum()) for group in can_cut) // 2)


def peak_memory(device: torch.device) -> int | None:
    """Return the peak memory of this process on a device. On MPS, return the memory currently allocated."""
    if device.type == "cuda":
        # Reserved, not allocated: the latter does not include the memory that CUDA graphs hold between steps.
        return torch.cuda.max_memory_reserved(device)
    return torch.mps.driver_allocated_memory() if device.type == "mps" else peak_memory_bytes()


class PinnedMemory:
    """Blocks of pinned memory that are used again: pinning was measured at 7 GiB/s, copying into them at 50 GiB/s.

    Ordinary memory is pinned, once all threads have touched it: torch's pinned memory takes three times as long, and
    its sizes are rounded up to powers of two.
    """

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self._free: list[Tensor] = []

    def reset(self) -> None:
        """Make all blocks free again. Tensors that were taken from them must no longer be in use."""
        self._free = list(self._blocks)

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Return an uninitialised contiguous tensor in pinned memory, with the shape and dtype of another."""
        size = -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        while self._free and len(self._free[0]) < size:
            self._free.pop(0)
        if not self._free:
            # Rounded up: if tensors grow a little from step to step, blocks of the exact size could not be used again.
            self._free = [_pinned(-(-size // _BLOCK_BYTES) * _BLOCK_BYTES)]
            self._blocks += self._free
        taken, self._free[0] = self._free[0][: tensor.nbytes], self._free[0][size:]
        return taken.view(tensor.dtype).view(tensor.shape)


def _pinned(num_bytes: int) -> Tensor:
    cuda: Any = torch.cuda.cudart()
    memory = torch.empty(num_bytes, dtype=torch.uint8).fill_(0)
    if int(cuda.cudaHostRegister(memory.data_ptr(), num_bytes, 0)):  # the system limits pinned memory, or lacks it
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")  # raises the error of the failed call, which the next kernel would raise
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    weakref.finalize(memory, cuda.cudaHostUnregister, memory.data_ptr()).atexit = False
    return memory
