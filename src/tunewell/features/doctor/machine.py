"""The facts of the machine for the checks: those of `hardware.machine`, the driver, the PCI bus, disks, variables."""

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from tunewell.features.doctor.facts import Disk, MachineFacts
from tunewell.machine import machine as hardware
from tunewell.machine.nvidia_smi import SmiAnswer, query_gpus
from tunewell.machine.system import System

_NVIDIA, _DISPLAY_CLASS = "0x10de", "0x03"
_VARIABLES = (
    *("BNB_CUDA_VERSION", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_ENDPOINT"),
    *("LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH", "PYTHONNOUSERSITE"),
)


def read_machine(folders: Mapping[str, Path], *, is_fast: bool = False, system: System | None = None) -> MachineFacts:
    """Return the facts of this machine. `is_fast` does not start nvidia-smi. `folders`: purpose -> folder of a run."""
    system = system or System()
    found = hardware.read_machine(system, asks_gpus=False)
    answer = SmiAnswer("not asked") if is_fast else query_gpus(system)
    return MachineFacts(
        smi=answer.state,
        smi_message=answer.message,
        gpus=answer.gpus,
        kernel_driver=_kernel_driver(system.read("/proc/driver/nvidia/version")),
        num_pci_gpus=0 if is_fast else _pci_gpus(system, Path("/sys/bus/pci/devices")),
        is_wsl=found.is_wsl,
        memory_bytes=found.cpu.memory_bytes,
        free_memory_bytes=found.cpu.free_bytes,
        shared_memory_bytes=system.total_disk("/dev/shm"),
        disks=[disk for purpose, folder in folders.items() if (disk := _disk(purpose, folder))],
        variables={name: value for name in _VARIABLES if (value := system.variable(name))},
    )


def _kernel_driver(text: str) -> str | None:
    found = re.search(r"Kernel Module(?: for \w+)?\s+(\d+\.[\d.]+)", text)
    return found[1] if found else None


def _pci_gpus(system: System, devices: Path) -> int:
    folders = devices.iterdir() if devices.is_dir() else ()
    return sum(
        system.read(f"{folder}/vendor").strip() == _NVIDIA and system.read(f"{folder}/class").startswith(_DISPLAY_CLASS)
        for folder in folders
    )


def _disk(purpose: str, folder: Path) -> Disk | None:
    """Return the disk of a folder, or of its nearest parent that exists."""
    existing = next((path for path in (folder, *folder.parents) if path.is_dir()), None)
    if existing is None:
        return None
    try:
        free = shutil.disk_usage(existing).free
        # Some file systems (Btrfs, network drives) report no inodes.
        state = os.statvfs(existing) if hasattr(os, "statvfs") else None
    except OSError:
        return None
    inodes = state.f_favail if state is not None and state.f_files else None
    return Disk(purpose, str(existing), free, is_writable=os.access(existing, os.W_OK), free_inodes=inodes)
