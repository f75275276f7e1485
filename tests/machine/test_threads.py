"""The measured number of threads."""

import time

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tunewell.machine import device as threads
from tunewell.machine.device import fastest, measure_threads, thread_candidates

SMALL = [(64, 64, 96), (64, 96, 64)]
SMOLLM2 = [(2048, 576, 576), (2048, 576, 192), (2048, 576, 1536), (2048, 1536, 576)]


def test_what_is_measured_is_chosen_and_said():
    """Guards the promise that the number of threads is measured."""
    chosen = measure_threads(SMALL, candidates=[1, 2], seconds=0.1)
    assert chosen.value in (1, 2)
    assert "1 " in chosen.because and "2 " in chosen.because and "GFLOP/s" in chosen.because


def test_torch_keeps_its_own_number_of_threads():
    """Guards whoever measures and then decides otherwise."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        measure_threads(SMALL, candidates=[1, 2], seconds=0.05)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_measuring_a_real_models_shapes_takes_seconds_at_most():
    """Guards the start of every run on a CPU: rows are cut down, not windows stretched."""
    start = time.perf_counter()
    measure_threads(SMOLLM2, candidates=[1, 2])
    assert time.perf_counter() - start < 5


def test_the_work_is_counted_as_torch_counts_it():
    """Guards the GFLOP/s that people compare with their machine's."""
    products = threads._products(SMOLLM2)
    with FlopCounterMode(display=False) as counter:
        for product in products:
            threads._multiply(product)
    assert sum(product.flops for product in products) == counter.get_total_flops()


def test_the_share_of_each_shape_is_kept_when_rows_are_cut():
    """Guards against measuring another mixture than the model's."""
    kept = [product.left.shape[0] for product in threads._products([*SMOLLM2, *SMOLLM2])]
    assert len(kept) == len(SMOLLM2) and len(set(kept)) == 1 and kept[0] < 2048


@pytest.mark.parametrize(
    ("rates", "chosen"),
    [
        ({1: 49e9, 2: 93e9}, 2),
        ({1: 81e9, 2: 49e9}, 1),
        ({1: 96e9, 2: 100e9}, 1),
        ({1: 94e9, 2: 100e9}, 2),
        ({1: 10e9, 8: 70e9, 16: 73e9, 32: 50e9}, 8),
    ],
)
def test_the_fastest_is_chosen_and_of_equals_the_fewest(rates, chosen):
    """Guards busy machines, where two threads can be slower than one, and gains too small to hold a core for."""
    assert fastest(rates).value == chosen


def test_the_reason_has_the_numbers():
    """Guards the words beside the number of threads."""
    assert fastest({1: 49e9, 2: 93e9}).because == "2 threads gave 93 GFLOP/s, 1 gave 49"
    assert fastest({1: 97e9, 2: 100e9}).because.endswith("the fewest within 5% of the fastest")


@pytest.mark.parametrize(
    ("cores", "physical", "candidates"),
    [(1, 1, [1]), (2, 1, [1, 2]), (4, None, [1, 2, 3, 4]), (16, 8, [1, 8, 16]), (96, 64, [1, 48, 64, 96])],
)
def test_many_cores_have_few_candidates(cores, physical, candidates):
    """Guards the start of a run on a large machine."""
    assert thread_candidates(cores, physical) == candidates


def test_one_core_needs_no_measuring():
    """Guards the smallest machines."""
    assert measure_threads(SMALL, candidates=[1]).because == "1 core available"


@pytest.mark.parametrize(("text", "expected"), [("1", [1]), ("1,2", [1]), ("64", [1, 2]), ("many", [1, 2])])
def test_no_more_threads_are_tried_than_the_environment_allows(text, expected, monkeypatch):
    """`torchrun` and schedulers set `OMP_NUM_THREADS`; a second was spent on measuring what it forbids."""
    monkeypatch.setattr(threads, "usable_cores", lambda: 2)
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert threads.useful_threads() == expected
    if expected == [1]:
        assert measure_threads(SMALL, seconds=60).because == "`OMP_NUM_THREADS` is 1"
