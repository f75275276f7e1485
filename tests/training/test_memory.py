"""What is let go of when memory was short, and how a step is cut."""

import random
import weakref
from itertools import pairwise

import numpy as np
import pytest
import torch

from tunewell.machine.out_of_memory import OutOfMemory, free_memory, is_out_of_memory
from tunewell.training import memory as training_memory
from tunewell.training.memory import PinnedMemory, smaller


class Large:
    """Stands for what a forward pass has computed so far."""


def test_nothing_is_held_by_an_error_that_lives_on() -> None:
    held: list[weakref.ref[Large]] = []

    def forward() -> None:
        large = Large()
        held.append(weakref.ref(large))
        raise torch.OutOfMemoryError("CUDA out of memory")

    def step() -> None:
        try:
            forward()
        except RuntimeError as error:
            raise OutOfMemory(str(error)) from None

    with pytest.raises(OutOfMemory) as caught:
        step()
    assert held[0]() is not None
    free_memory(caught.value)
    assert held[0]() is None


@pytest.mark.parametrize(
    ("lengths", "groups", "is_recomputing", "expected"),
    [
        ([10, 10, 10, 10], [[0, 1], [2, 3]], False, 10),
        ([10, 10, 10, 29], [[0, 1, 2], [3]], False, 15),
        ([10, 10, 10, 30], [[3], [0, 1, 2]], False, None),
        ([10, 10, 10, 90], [[3], [0, 1, 2]], False, None),
        ([10, 10, 10, 90], [[3], [0, 1, 2]], True, 15),
        ([10, 90], [[1], [0]], True, None),
    ],
)
def test_a_step_is_cut_where_cutting_can_help(
    lengths: list[int], groups: list[list[int]], is_recomputing: bool, expected: int | None
) -> None:
    """A document that is longer than any micro-batch is not made smaller by cutting the others."""
    parts = [np.array(group) for group in groups]
    assert smaller(parts, np.array(lengths), is_recomputing=is_recomputing) == expected


def _after(first: BaseException) -> BaseException:
    """As the end of a recording fails after what was recorded did."""
    error = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    error.__context__ = first
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (_after(torch.OutOfMemoryError("CUDA out of memory.")), True),
        (_after(ValueError("something else")), False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("MPS backend out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_memory_errors_are_known_by_their_words(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_tensors_of_other_sizes_use_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers were kept per shape, and packed steps rarely have the same length: a run filled the main memory."""
    allocated: list[int] = []

    def allocate(num_bytes: int) -> torch.Tensor:
        allocated.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    monkeypatch.setattr(training_memory, "_pinned", allocate)
    monkeypatch.setattr(training_memory, "_BLOCK_BYTES", 1 << 16)
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
