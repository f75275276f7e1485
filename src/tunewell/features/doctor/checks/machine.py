"""Checks of disks and memory."""

from collections.abc import Iterator

from tunewell.core.units import size_bytes
from tunewell.features.doctor.facts import Environment
from tunewell.features.doctor.findings import EnvironmentProblem

_GIB = 1 << 30
_FULL, _LOW = 1 * _GIB, 5 * _GIB
"""Below 1 GiB a checkpoint or a package fails to be written; 5 GiB hold the checkpoints of LoRA on a 1B model."""
_LITTLE_MEMORY = 2 * _GIB
"""Importing torch and transformers and loading a model of 135 M parameters takes 1.5 GiB."""
_SMALL_SHM = 256 << 20
"""Docker's default is 64 MiB, in which two data loader workers of other trainers do not fit."""
_FEW_INODES = 1000


def disks(facts: Environment) -> Iterator[EnvironmentProblem]:
    """Find full, read-only or nearly full disks. A file system that serves several purposes is reported once."""
    seen: set[int] = set()
    for disk in facts.machine.disks:
        if not disk.is_writable:
            yield EnvironmentProblem(
                "disk-read-only",
                "broken",
                f"{disk.purpose} cannot be written: `{disk.path}`",
                "the run folder and its checkpoints are written there",
                "change the owner or choose another folder with `run:` in the config or `--out`",
            )
        has_few_inodes = disk.free_inodes is not None and disk.free_inodes < _FEW_INODES
        is_full = disk.free_bytes < _FULL or has_few_inodes
        if not is_full and disk.free_bytes >= _LOW:
            continue
        if (free_mib := disk.free_bytes >> 20) in seen:
            continue
        seen.add(free_mib)
        left = f"{disk.free_inodes} inodes" if has_few_inodes else size_bytes(disk.free_bytes)
        yield EnvironmentProblem(
            "disk-full" if is_full else "disk-low",
            "broken" if is_full else "warning",
            f"the disk of {disk.purpose} is {'full' if is_full else 'nearly full'}: {left} are free in `{disk.path}`",
            "checkpoints, downloads and pip need space; a run stops when the disk is full",
            "delete what you do not need: old runs, `pip cache purge`, models in the hub cache (`hf cache ls`)",
        )


def memory(facts: Environment) -> Iterator[EnvironmentProblem]:
    """Find too little free memory, and a small /dev/shm."""
    machine = facts.machine
    if machine.free_memory_bytes is not None and machine.free_memory_bytes < _LITTLE_MEMORY:
        where = (
            "WSL gives Linux half of the memory: set `memory=` in `.wslconfig`" if machine.is_wsl else "end programs"
        )
        yield EnvironmentProblem(
            "memory-low",
            "warning",
            f"{size_bytes(machine.free_memory_bytes)} of memory are free",
            "loading torch and a small model takes 1.5 GiB; the system ends a process that needs more than there is",
            f"{where}, or train elsewhere: `tunewell notebook`",
        )
    if machine.shared_memory_bytes is not None and machine.shared_memory_bytes < _SMALL_SHM:
        yield EnvironmentProblem(
            "shm-small",
            "warning",
            f"/dev/shm has {size_bytes(machine.shared_memory_bytes)}",
            "data loader workers and several GPUs share memory there: Bus error, or No space left on device",
            "start the container with `--shm-size=8g` or `--ipc=host`",
            evidence=["NVIDIA/Megatron-LM#878", "facebookresearch/mmf#441"],
        )
