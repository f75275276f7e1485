"""Recorded facts of environments, from which tests build the ones they need."""

from dataclasses import replace
from typing import Any

from tunewell.features.doctor.facts import Disk, Environment, ImportTrial, MachineFacts, Package, Python, TorchBuild
from tunewell.machine.nvidia_smi import Gpu

GIB = 1 << 30
SITE = "/home/ada/venv/lib/python3.11/site-packages"
MARKERS = {
    "implementation_name": "cpython",
    "implementation_version": "3.11.7",
    "os_name": "posix",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "platform_release": "6.1",
    "platform_system": "Linux",
    "platform_version": "1",
    "python_full_version": "3.11.7",
    "python_version": "3.11",
    "sys_platform": "linux",
}
VERSIONS = {
    "accelerate": "1.15.0",
    "datasets": "5.2.0",
    "numpy": "2.4.6",
    "peft": "0.21.2",
    "torch": "2.13.0",
    "transformers": "5.22.2",
    "trl": "1.16.0",
}
T4 = Gpu("Tesla T4", "580.65.06", 15 * GIB, 14 * GIB, (7, 5))
V100 = Gpu("Tesla V100-SXM2-16GB", "580.65.06", 16 * GIB, 15 * GIB, (7, 0))
H200 = Gpu("NVIDIA H200", "580.159.04", 139 * GIB, 138 * GIB, (9, 0))
RTX_5090 = Gpu("NVIDIA GeForce RTX 5090", "580.65.06", 32 * GIB, 30 * GIB, (12, 0))


def package(name: str, version: str, **more: Any) -> Package:
    """Return an installed package."""
    return Package(name, version, f"{SITE}/{name}-{version}.dist-info", **more)


def sound(versions: dict[str, str] | None = None, **more: Any) -> Environment:
    """Return a sound environment on a machine without a GPU."""
    machine = MachineFacts(
        smi="missing",
        memory_bytes=32 * GIB,
        free_memory_bytes=20 * GIB,
        shared_memory_bytes=16 * GIB,
        disks=[Disk("the run folder", "/home/ada/project", 200 * GIB)],
    )
    found = Environment(
        python=Python("3.11.7", "/home/ada/venv/bin/python", markers=MARKERS),
        packages=[package(name, version) for name, version in (VERSIONS | (versions or {})).items()],
        torch=TorchBuild("2.13.0+cpu"),
        machine=machine,
        imports=[ImportTrial(name) for name in VERSIONS],
    )
    return replace(found, **more)


def with_gpu(gpu: Gpu, *, cuda: str | None = "13.0", torch: str = "2.13.0", **machine: Any) -> Environment:
    """Return a sound environment on a machine with a GPU, with torch for a CUDA version."""
    found = sound(torch=TorchBuild(torch, cuda))
    return replace(found, machine=replace(found.machine, **({"smi": "ok", "gpus": [gpu]} | machine)))
