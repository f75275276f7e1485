"""Which micro-batch sizes a probe measures."""

import math
from typing import Any

from tunewell.training.trial import compare_sizes

DEADLINE = math.inf


def _measured(rates: dict[int, float | None]) -> Any:
    def measure(tokens: int) -> dict[str, Any] | None:
        rate = rates[tokens]
        return None if rate is None else {"rate": rate, "loss": 1.0, "reserved": tokens}

    return measure


def test_slow_small_sizes_do_not_end_the_comparison() -> None:
    """Guards GPUs, where half the micro-batch takes as long and so has half the speed."""
    rates = {2_048: 35e3, 4_096: 73e3, 8_192: 135e3, 16_384: 243e3, 32_768: 457e3}
    found = compare_sizes([*reversed(rates)], _measured(rates), DEADLINE)
    assert {size["tokens"]: size["rate"] for size in found} == rates


def test_a_size_that_spills_into_main_memory_ends_the_comparison() -> None:
    """Guards Windows and WSL, where a full GPU is slow instead of out of memory."""
    found = compare_sizes([1, 2, 4, 8], _measured({1: 10.0, 2: 18.0, 4: 8.0, 8: 30.0}), DEADLINE)
    assert [size["tokens"] for size in found] == [1, 2]


def test_out_of_memory_and_the_deadline_end_the_comparison() -> None:
    rates = {1: 10.0, 2: 18.0, 4: None, 8: 30.0}
    assert [size["tokens"] for size in compare_sizes([1, 2, 4, 8], _measured(rates), DEADLINE)] == [1, 2]
    assert compare_sizes([1, 2, 4, 8], _measured(rates), 0.0) == []
