"""Find the compute device (CPU, CUDA, MPS) and its memory with torch."""

import re

import torch

from tunewell.core.errors import UserError
from tunewell.hardware.facts import DeviceFacts, cpu_facts

_AMPERE = (8, 0)


def probe_device(name: str) -> DeviceFacts:
    """Return a device's facts (`auto`: the best device, `cuda`: torch's current GPU); raise UserError if not found."""
    available = _available_devices()
    asked = name
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
    return _mps_facts() if name == "mps" else _cuda_facts(name)


def _available_devices() -> list[str]:
    """Return the names of the devices of this machine, best first."""
    cuda = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return [*cuda, *(["mps"] if torch.backends.mps.is_available() else []), "cpu"]


def _cuda_facts(name: str) -> DeviceFacts:
    capability = torch.cuda.get_device_capability(name)
    free, total = torch.cuda.mem_get_info(name)
    # torch also reports ROCm as CUDA, but its capability numbers differ and the varlen kernel is untested there.
    is_amd = torch.version.hip is not None
    return DeviceFacts(
        kind="cuda",
        name=name,
        label=torch.cuda.get_device_name(name),
        memory_bytes=total,
        free_bytes=free,
        has_bf16=capability >= _AMPERE,
        has_flash=capability >= _AMPERE and not is_amd,
    )


def _mps_facts() -> DeviceFacts:
    total = torch.mps.recommended_max_memory()
    free = max(0, total - torch.mps.driver_allocated_memory())
    # bf16 is off until it has been compared with fp32 on such a machine.
    return DeviceFacts("mps", "mps", "Apple GPU", total, free, has_bf16=False, has_flash=False)
