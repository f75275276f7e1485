"""Which device a run computes on, as torch sees it."""

import re

import torch

from tunewell.core.errors import UserError
from tunewell.hardware.facts import DeviceFacts, cpu_facts, peak_memory_bytes

_AMPERE = (8, 0)


def probe_device(wanted: str) -> DeviceFacts:
    """Describe the device `wanted` names; `auto` is CUDA where there is one, then MPS, then the CPU.

    `cuda` without a number is the GPU torch is set to, the first unless a launcher has chosen another. Raises
    UserError, naming what is there, when it is no device or not one of this machine's.
    """
    there = _devices_there()
    name = there[0].partition(":")[0] if wanted == "auto" else wanted
    if name == "cuda" and "cuda:0" in there:
        name = f"cuda:{torch.cuda.current_device()}"
    if name not in there:
        is_known = re.fullmatch(r"cpu|mps|cuda(:\d+)?", wanted)
        what = f"there is no device `{wanted}` here" if is_known else f"`{wanted}` is not a device"
        raise UserError(
            what,
            where=f"torch {torch.__version__} finds: {', '.join(there)}",
            fix=f"set `device` to {' or '.join(f'`{known}`' for known in ['auto', *there])}",
        )
    if name == "cpu":
        return cpu_facts()
    return _mps_facts() if name == "mps" else _cuda_facts(name)


def memory_in_use(device: str | torch.device) -> int | None:
    """Give the peak bytes of a device's memory in this process so far; None where it cannot be known.

    On the CPU it is the peak of the whole process, on MPS what the driver holds now.
    """
    kind = torch.device(device).type
    if kind == "cuda":
        # What is reserved, not what is allocated: the latter forgets what CUDA graphs keep between two steps.
        return torch.cuda.max_memory_reserved(device)
    return torch.mps.driver_allocated_memory() if kind == "mps" else peak_memory_bytes()


def _devices_there() -> list[str]:
    """List the names of this machine's devices, the best first."""
    cuda = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return [*cuda, *(["mps"] if torch.backends.mps.is_available() else []), "cpu"]


def _cuda_facts(name: str) -> DeviceFacts:
    capability = torch.cuda.get_device_capability(name)
    free, total = torch.cuda.mem_get_info(name)
    # ROCm answers to the name of CUDA, but its numbers mean other generations and the varlen kernel is untried there.
    is_amd = torch.version.hip is not None
    return DeviceFacts(
        kind="cuda",
        name=name,
        label=torch.cuda.get_device_name(name),
        memory_bytes=total,
        free_bytes=free,
        has_bf16=capability >= _AMPERE,
        has_flash=capability >= _AMPERE and not is_amd,
        capability=capability,
    )


def _mps_facts() -> DeviceFacts:
    total = torch.mps.recommended_max_memory()
    free = max(0, total - torch.mps.driver_allocated_memory())
    # fp32 until bf16 has been compared with it on such a machine.
    return DeviceFacts("mps", "mps", "Apple GPU", total, free, has_bf16=False, has_flash=False)
