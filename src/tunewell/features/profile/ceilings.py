"""Measure the best rates of a device: large matrix products and large copies."""

import time
from collections.abc import Callable

import torch

from tunewell.features.profile.processor import ProcessorWait
from tunewell.features.profile.records import Ceilings

_SIZES = {"cpu": (512, 1024), "cuda": (4096, 8192), "mps": (2048,)}
"""Sides of the square matrices. The best size counts."""
_COPY_BYTES = {"cpu": 256 << 20, "cuda": 512 << 20, "mps": 512 << 20}
_SECONDS = 0.3


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Return the best rates, measured for about a second. The results of several tries differ; the best is taken."""
    rates = [_matmul_rate(device, dtype, size) for size in _SIZES[device.type]]
    source = torch.zeros(_COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = _best_seconds(lambda: target.copy_(source), device)
    return Ceilings(matmul_flops=max(rates), bytes_per_second=2 * source.nbytes / seconds)


def _matmul_rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    left, right = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    return 2.0 * size**3 / _best_seconds(lambda: torch.mm(left, right, out=out), device)


def _best_seconds(act: Callable[[], object], device: torch.device) -> float:
    act()
    synchronize(device)
    wait = ProcessorWait()  # the time of other programs does not count
    best, deadline = float("inf"), time.perf_counter() + _SECONDS
    while time.perf_counter() < deadline:
        started = time.perf_counter() - wait.seconds()
        act()
        synchronize(device)
        best = min(best, time.perf_counter() - wait.seconds() - started)
    wait.close()
    return best


def synchronize(device: torch.device) -> None:
    """Wait until a device has computed everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
