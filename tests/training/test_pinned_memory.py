"""Pinned memory is used again, whatever the sizes of the tensors."""

import random
from itertools import pairwise

import pytest
import torch

from tunewell.training import pinned_memory
from tunewell.training.pinned_memory import PinnedMemory


def test_tensors_of_other_sizes_use_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers were kept per shape, and packed steps rarely have the same length: a run filled the main memory."""
    allocated: list[int] = []

    def allocate(num_bytes: int) -> torch.Tensor:
        allocated.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    monkeypatch.setattr(pinned_memory, "_pinned", allocate)
    monkeypatch.setattr(pinned_memory, "_BLOCK_BYTES", 1 << 16)
    memory, draw, largest = PinnedMemory(), random.Random(0), 0
    for _ in range(200):
        memory.reset()
        shape = (1, draw.randint(1, 300), 64)
        taken = [memory.empty_like(torch.empty(shape)) for _ in range(22)]
        starts = sorted(tensor.data_ptr() for tensor in taken)
        assert all(tensor.shape == shape and tensor.is_contiguous() for tensor in taken)
        assert all(after - start >= taken[0].nbytes for start, after in pairwise(starts))
        largest = max(largest, 22 * taken[0].nbytes)
    assert sum(allocated) < 3 * largest
