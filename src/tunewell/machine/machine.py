"""What this machine is, read without torch: GPUs, WSL, Colab, containers, Macs, shared memory, other users.

All facts come from a `System`: files, environment variables and programs. Tests replay recorded ones.
"""

import re
from dataclasses import dataclass, replace

from tunewell.machine.facts import DeviceFacts, apple_facts, cpu_facts, cpu_flops, main_memory
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
            return apple_facts(total, free)
        return self.cpu


def read_machine(system: System | None = None, *, asks_gpus: bool = True) -> Machine:
    """Read the facts of the machine. nvidia-smi may be missing, hang or fail; `gpu_problem` says so.

    Without `asks_gpus`, nvidia-smi is not started.
    """
    system = system or System()
    kernel = system.read("/proc/version").lower()
    is_mac = system.platform == "darwin"
    cpu = _mac_cpu(system) if is_mac else cpu_facts(system.read)
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
        container_bytes=None if is_mac else main_memory(system.read)[2],
        shared_memory_bytes=None if is_mac else system.free_disk("/dev/shm"),
        gpus=tuple(gpus),
        gpu_problem=problem,
        torch=system.installed("torch"),
    )


def _output(system: System, *command: str) -> str:
    """Return the output of a program, or an empty text if it does not exist or fails."""
    try:
        return (system.run(command, seconds=_PROGRAM_SECONDS) or "").strip()
    except OSError:
        return ""


def _mac_cpu(system: System) -> DeviceFacts:
    total, pages = _output(system, "sysctl", "-n", "hw.memsize"), _output(system, "vm_stat")
    size = re.search(r"page size of (\d+) bytes", pages)
    kinds = ("free", "inactive", "speculative", "purgeable")
    numbers = [re.search(rf"^Pages {kind}:\s*(\d+)\.", pages, re.MULTILINE) for kind in kinds]
    free = sum(int(number[1]) for number in numbers if number) * int(size[1]) if size else None
    label = _output(system, "sysctl", "-n", "machdep.cpu.brand_string") or "Apple CPU"
    return DeviceFacts("cpu", "cpu", label, int(total) if total.isdigit() else None, free)


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
