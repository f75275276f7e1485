"""Find the compute device (CPU, CUDA, MPS) and its memory, and measure which number of CPU threads is fastest."""

import os
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch

from tunewell.core.errors import UserError
from tunewell.core.units import count
from tunewell.machine.facts import DeviceFacts, apple_facts, cpu_facts, gpu_facts, physical_cores, usable_cores
from tunewell.records.plan import Chosen


def probe_device(name: str) -> DeviceFacts:
    """Return a device's facts (`auto`: the best device, `cuda`: torch's current GPU); raise UserError if not found."""
    available = _available_devices()
    asked, name = name, name.replace("mps:0", "mps")  # as torch calls the device of a tensor
    if name == "auto":
        name = available[0].partition(":")[0]
    if name == "cuda" and "cuda:0" in available:
        name = f"cuda:{torch.cuda.current_device()}"
    if name not in available:
        is_known = re.fullmatch(r"cpu|mps|cuda(:\d+)?", asked)
        what = f"this machine has no device `{asked}`" if is_known else f"`{asked}` is not a device"
        raise UserError(
            what,
            where=f"torch {torch.__version__} finds: {', '.join(available)}",
            fix=f"set `device` to {' or '.join(f'`{known}`' for known in ['auto', *available])}",
        )
    if name == "cpu":
        return cpu_facts()
    if name == "mps":
        total = torch.mps.recommended_max_memory()
        return apple_facts(total, max(0, total - torch.mps.driver_allocated_memory()))
    return _cuda_facts(name)


def _available_devices() -> list[str]:
    """Return the names of the devices of this machine, best first."""
    cuda = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return [*cuda, *(["mps"] if torch.backends.mps.is_available() else []), "cpu"]


def _cuda_facts(name: str) -> DeviceFacts:
    capability, label = torch.cuda.get_device_capability(name), torch.cuda.get_device_name(name)
    free, total = torch.cuda.mem_get_info(name)
    found = gpu_facts(name, label, total, free, capability=capability)
    # torch also reports ROCm as CUDA, but its capability numbers differ and the varlen kernel is untested there.
    return replace(found, has_flash=found.has_flash and torch.version.hip is None)


# Measure which number of CPU threads is fastest; on a busy machine, more threads can be slower.

Shape = tuple[int, int, int]
_ROUNDS = 5
_PASS_FLOPS = 1e9
"""Number of operations in one pass over all shapes: about 10 ms on two cores, so that a window has several passes."""
_MIN_ROWS = 32
_NEAR_ENOUGH = 0.95
_SECONDS = 1.0


class _Product(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor
    out: torch.Tensor

    @property
    def flops(self) -> float:
        rows, inner = self.left.shape
        return 2.0 * rows * inner * self.right.shape[1]


def measure_threads(
    shapes: Sequence[Shape], *, candidates: Sequence[int] | None = None, seconds: float = _SECONDS
) -> Chosen[int]:
    """Time products of fp32 matrices (rows, inner, columns) for `seconds`; return the fastest number of threads."""
    counts = sorted(set(candidates or useful_threads()))
    if len(counts) == 1:
        is_limited = candidates is None and usable_cores() > counts[0]
        because = f"`OMP_NUM_THREADS` is {counts[0]}" if is_limited else f"{count(counts[0], 'core')} available"
        return Chosen(counts[0], because=because)
    with torch_threads(torch.get_num_threads()):
        return fastest(_rates(_products(shapes), counts, seconds))


@contextmanager
def torch_threads(num_threads: int | None) -> Iterator[None]:
    """Set the number of torch threads and restore the previous number on exit; None changes nothing."""
    before = torch.get_num_threads()
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        if num_threads is not None:
            torch.set_num_threads(before)


def useful_threads() -> list[int]:
    """Return the thread counts that are worth trying on this machine, at most `OMP_NUM_THREADS`."""
    return thread_candidates(min(usable_cores(), _thread_limit() or usable_cores()), physical_cores())


def _thread_limit() -> int | None:
    """Return the number of threads that the user, or a launcher of several processes, allows; None: any number."""
    text = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(text) if text.isdecimal() and int(text) > 0 else None


def thread_candidates(num_cores: int, num_physical: int | None) -> list[int]:
    """Return the thread counts to measure: each one up to four cores, otherwise one, half, physical and all cores."""
    if num_cores <= 4:
        return list(range(1, num_cores + 1))
    physical = min(num_physical or num_cores, num_cores)
    return sorted({1, num_cores // 2, physical, num_cores})


def _products(shapes: Sequence[Shape]) -> list[_Product]:
    """Return the matrices, with the number of rows reduced so that a pass over all shapes is short."""
    distinct = list(dict.fromkeys(shapes))
    share = min(1.0, _PASS_FLOPS / sum(2.0 * rows * inner * columns for rows, inner, columns in distinct))
    kept = [(min(rows, max(_MIN_ROWS, int(rows * share))), inner, columns) for rows, inner, columns in distinct]
    return [_Product(torch.ones(m, k), torch.ones(k, n), torch.empty(m, n)) for m, k, n in kept]


def _rates(products: list[_Product], counts: Sequence[int], seconds: float) -> dict[int, float]:
    """Return FLOP/s by number of threads, measured in turns so that other load affects all of them equally."""
    window = seconds / (len(counts) * _ROUNDS)
    deadline = time.perf_counter() + seconds
    rates: dict[int, list[float]] = {threads: [] for threads in counts}
    for _ in range(_ROUNDS):
        for threads in counts:
            torch.set_num_threads(threads)
            _multiply(products[0])  # starts the threads
            rates[threads].append(_rate_in_window(products, window))
        if time.perf_counter() > deadline:
            break
    return {threads: statistics.median(measured) for threads, measured in rates.items()}


def _rate_in_window(products: list[_Product], window_seconds: float) -> float:
    flops, start = 0.0, time.perf_counter()
    while True:
        for product in products:
            _multiply(product)
            flops += product.flops
        passed = time.perf_counter() - start
        if passed >= window_seconds:
            return flops / passed


def _multiply(product: _Product) -> None:
    torch.mm(product.left, product.right, out=product.out)


def fastest(rates: dict[int, float]) -> Chosen[int]:
    """Choose the smallest number of threads whose FLOP/s are within 5% of the best."""
    best = max(rates.values())
    chosen = min(threads for threads, rate in rates.items() if rate >= _NEAR_ENOUGH * best)
    others = [f"{threads} gave {rates[threads] / 1e9:,.3g}" for threads in rates if threads != chosen]
    because = f"{count(chosen, 'thread')} gave {rates[chosen] / 1e9:,.3g} GFLOP/s, {', '.join(others)}"
    if rates[chosen] < best:
        because += "; the fewest within 5% of the fastest"
    return Chosen(chosen, because=because)
