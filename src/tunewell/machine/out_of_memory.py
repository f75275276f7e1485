"""Out of memory: detect it in the errors of all devices, and free memory."""

import gc
import traceback

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
"""Fragments of the out-of-memory messages of torch's allocators, cuBLAS, cuDNN and Apple's Metal."""


class OutOfMemory(Exception):
    """A step ran out of memory. Weights and optimizer state are unchanged, so the step can be repeated."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is an out-of-memory error or was caused by one."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError | OutOfMemory):
        return True
    # While CUDA graphs are recorded, only the first error is an OutOfMemoryError; later errors have it as context.
    is_caused = isinstance(error.__context__, torch.OutOfMemoryError)
    return isinstance(error, RuntimeError) and (is_caused or any(part in str(error).lower() for part in _FRAGMENTS))


def free_memory(after: BaseException) -> None:
    """Release all unused memory after an out-of-memory error.

    The frames of the traceback are cleared first. They hold activations and, in torch before 2.13, the hooks of the
    layer that gradient checkpointing was recomputing, which would remain active.
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
