"""What this machine is, read without torch: GPUs, WSL, Colab, containers, Macs, shared memory, other users.

All facts come from a `System`: files, environment variables and programs. Tests replay recorded ones.
"""

import re
from dataclasses import dataclass, field, replace

from tunewell.machine.facts import DeviceFacts, cpu_flops, has_real_bf16
from tunewell.machine.nvidia_smi import Gpu, SmiAnswer, gpu_users, query_gpus
from tunewell.machine.system import System

_PROGRAM_SECONDS = 5.0
_MPS_SHARE = 0.75
"""Share of a Mac's memory that Metal recommends for the GPU, on machines with more than 32 GB; two thirds below."""


@dataclass(frozen=True)
class Machine:
    """The facts of this machine that decide how a run behaves."""

    cpu: DeviceFacts
    cores: int
    flops: float
    """Rate of fp32 products on the CPU, beside its other work."""
    load: float | None = None
    is_wsl: bool = False
    is_colab: bool = False
    is_kaggle: bool = False
    is_mac: bool = False
    container_bytes: int | None = None
    """Memory limit of the container, if it is lower than the memory of the machine."""
    shared_memory_bytes: int | None = None
    gpus: tuple[Gpu, ...] = ()
    gpu_problem: str | None = None
    """Why the GPUs are not known, although there may be some."""
    torch: str | None = None
    """The installed version of torch, like `2.13.0+cpu`."""
    notes: tuple[str, ...] = field(default=())

    @property
    def has_cuda_torch(self) -> bool:
        """Whether torch may use a GPU. A wheel without a local version is the CUDA build on Linux and CPU elsewhere."""
        return self.torch is None or not self.torch.endswith("+cpu")

    def device(self, name: str) -> DeviceFacts:
        """Return the facts of `auto`, `cuda`, `cuda:1`, `mps` or `cpu`. An unavailable device becomes the CPU."""
        kind, _, index = name.partition(":")
        usable = self.gpus if self.has_cuda_torch else ()
        if kind in ("auto", "cuda") and usable:
            number = int(index) if index.isdigit() else 0
            return next((gpu.facts() for gpu in usable if gpu.index == number), usable[0].facts())
        if kind in ("auto", "mps") and self.is_mac and self.cpu.memory_bytes is not None:
            share = _MPS_SHARE if self.cpu.memory_bytes > 32 << 30 else 2 / 3
            total = int(share * self.cpu.memory_bytes)
            free = min(total, self.cpu.free_bytes) if self.cpu.free_bytes is not None else total
            return DeviceFacts("mps", "mps", "Apple GPU", total, free, has_bf16=False, has_flash=False)
        return self.cpu


def read_machine(system: System | None = None, *, asks_gpus: bool = True) -> Machine:
    """Read the facts of the machine. nvidia-smi may be missing, hang or fail; `gpu_problem` says so.

    Without `asks_gpus`, nvidia-smi is not started.
    """
    system = system or System()
    kernel = system.read("/proc/version").lower()
    is_mac = system.platform == "darwin"
    total, free, container = _mac_memory(system) if is_mac else _memory(system)
    label = _cpu_label(system, is_mac=is_mac)
    has_bf16 = has_real_bf16(system.read("/proc/cpuinfo"))
    cpu = DeviceFacts("cpu", "cpu", label, total, free, has_bf16=has_bf16, has_flash=False)
    answer = query_gpus(system) if asks_gpus else SmiAnswer("not asked")
    gpus, problem = _gpus(system, answer)
    cores, load = system.cores(), system.load()
    return Machine(
        cpu=cpu,
        cores=cores,
        flops=cpu_flops(system.read("/proc/cpuinfo"), cores=cores, load=load),
        load=load,
        is_wsl="microsoft" in kernel,
        is_colab=system.variable("COLAB_RELEASE_TAG") is not None or system.variable("COLAB_GPU") is not None,
        is_kaggle=system.variable("KAGGLE_KERNEL_RUN_TYPE") is not None,
        is_mac=is_mac,
        container_bytes=container,
        shared_memory_bytes=None if is_mac else system.free_disk("/dev/shm"),
        gpus=tuple(gpus),
        gpu_problem=problem,
        torch=system.installed("torch"),
    )


def _cpu_label(system: System, *, is_mac: bool) -> str:
    if is_mac:
        return (_try(system, ["sysctl", "-n", "machdep.cpu.brand_string"]) or "Apple CPU").strip()
    named = re.search(r"^model name\s*:\s*(\S.*)$", system.read("/proc/cpuinfo"), re.MULTILINE)
    return named[1].strip() if named else "CPU"


def _try(system: System, command: list[str]) -> str | None:
    try:
        return system.run(command, seconds=_PROGRAM_SECONDS)
    except OSError:
        return None


def _mac_memory(system: System) -> tuple[int | None, int | None, None]:
    total = (_try(system, ["sysctl", "-n", "hw.memsize"]) or "").strip()
    pages = _try(system, ["vm_stat"]) or ""
    size = re.search(r"page size of (\d+) bytes", pages)
    kinds = ("free", "inactive", "speculative", "purgeable")
    numbers = [re.search(rf"^Pages {kind}:\s*(\d+)\.", pages, re.MULTILINE) for kind in kinds]
    free = sum(int(number[1]) for number in numbers if number) * int(size[1]) if size else None
    return int(total) if total.isdigit() else None, free, None


def _memory(system: System) -> tuple[int | None, int | None, int | None]:
    """Return total and available memory, and the container's limit if it is lower."""
    lines = re.findall(r"^(\w+):\s*(\d+) kB$", system.read("/proc/meminfo"), re.MULTILINE)
    known = {name: int(kib) * 1024 for name, kib in lines}
    total, free = known.get("MemTotal"), known.get("MemAvailable")
    for folder, limit_name, used_name, cache in (
        ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit = system.read(f"{folder}/{limit_name}").strip()
        used = system.read(f"{folder}/{used_name}").strip()
        if limit.isdigit() and used.isdigit() and total is not None and int(limit) < total:
            found = re.search(rf"^{cache} (\d+)$", system.read(f"{folder}/memory.stat"), re.MULTILINE)
            left = max(0, int(limit) - int(used) + (int(found[1]) if found else 0))
            return int(limit), left if free is None else min(left, free), int(limit)
    return total, free, None


def _gpus(system: System, answer: SmiAnswer) -> tuple[list[Gpu], str | None]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES allows, as torch counts them, and why they are not known."""
    visible = system.variable("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return [], None
    found = [gpu for gpu in answer.gpus if gpu.memory_bytes]
    if len(found) < len(answer.gpus):
        return [], f"`nvidia-smi` does not report the memory of {answer.gpus[0].name}"
    users = gpu_users(system) if len(found) == 1 else ()
    numbers = [part.strip() for part in (visible or "").split(",") if part.strip()]
    chosen = [gpu for gpu in found if not numbers or str(gpu.index) in numbers or not numbers[0].isdigit()]
    ordered = sorted(chosen, key=lambda gpu: numbers.index(str(gpu.index)) if str(gpu.index) in numbers else gpu.index)
    # torch counts the visible GPUs from 0.
    return [replace(gpu, index=number, users=users) for number, gpu in enumerate(ordered)], answer.problem
