"""What this machine is, read without torch: GPUs, WSL, Colab, containers, Macs, shared memory, other users.

All facts come from a `System`: files, environment variables and programs. Tests replay recorded ones.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tunewell.hardware.cards import match_card, parse_capability
from tunewell.hardware.facts import DeviceFacts, has_real_bf16, usable_cores

_QUERY = "index,name,memory.total,memory.free,compute_cap,driver_version,utilization.gpu"
_SMI_SECONDS = 5.0
_AMPERE = (8, 0)
_MPS_SHARE = 0.75
"""Share of a Mac's memory that Metal recommends for the GPU, on machines with more than 32 GB; two thirds below."""


class System:
    """The files, variables and programs of the machine."""

    platform = sys.platform

    def read(self, path: str) -> str:
        """Return the text of a file, or an empty text if it does not exist."""
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def variable(self, name: str) -> str | None:
        """Return an environment variable."""
        return os.environ.get(name)

    def run(self, command: Sequence[str], *, seconds: float) -> str | None:
        """Return the output of a program, or None if it does not exist. Raise OSError if it fails or hangs."""
        if shutil.which(command[0]) is None:
            return None
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds)
        except subprocess.TimeoutExpired:
            raise OSError(f"`{command[0]}` did not answer within {seconds:g} s") from None
        if done.returncode:
            reason = (done.stdout + done.stderr).strip().splitlines()
            raise OSError(f"`{command[0]}` failed: {reason[0] if reason else f'exit code {done.returncode}'}")
        return done.stdout

    def free_disk(self, path: str) -> int | None:
        """Return the free bytes of the file system of a path, or None if it does not exist."""
        try:
            return shutil.disk_usage(path).free
        except OSError:
            return None

    def installed(self, package: str) -> str | None:
        """Return the version of an installed package, or None."""
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    def cores(self) -> int:
        """Return the number of usable cores."""
        return usable_cores()

    def load(self) -> float | None:
        """Return the load average of the last minute, or None on Windows."""
        return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU as nvidia-smi reports it."""

    index: int
    name: str
    memory_bytes: int
    free_bytes: int
    capability: tuple[int, int]
    driver: str
    busy_share: float | None = None
    users: tuple[str, ...] = ()
    """Other processes that hold memory on it: `python, 3.2 GiB`."""

    def facts(self) -> DeviceFacts:
        """Return the facts as torch would report them."""
        is_new = self.capability >= _AMPERE
        name = f"cuda:{self.index}"
        return DeviceFacts(
            "cuda", name, self.name, self.memory_bytes, self.free_bytes, has_bf16=is_new, has_flash=is_new
        )


@dataclass(frozen=True)
class Machine:
    """The facts of this machine that decide how a run behaves."""

    cpu: DeviceFacts
    cores: int
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


def read_machine(system: System | None = None) -> Machine:
    """Read the facts of the machine. nvidia-smi may be missing, hang or fail; `gpu_problem` says so."""
    system = system or System()
    kernel = system.read("/proc/version").lower()
    is_mac = system.platform == "darwin"
    total, free, container = _mac_memory(system) if is_mac else _memory(system)
    label = _cpu_label(system, is_mac=is_mac)
    has_bf16 = has_real_bf16(system.read("/proc/cpuinfo"))
    cpu = DeviceFacts("cpu", "cpu", label, total, free, has_bf16=has_bf16, has_flash=False)
    gpus, problem = _gpus(system)
    return Machine(
        cpu=cpu,
        cores=system.cores(),
        load=system.load(),
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
        return system.run(command, seconds=_SMI_SECONDS)
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


def _gpus(system: System) -> tuple[list[Gpu], str | None]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES allows, and why they are not known."""
    visible = system.variable("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return [], None
    try:
        text = system.run(
            ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"], seconds=_SMI_SECONDS
        )
        found = [_parse_gpu(line) for line in (text or "").strip().splitlines()]
    except OSError as error:
        return [], str(error)
    except (ValueError, IndexError):
        return [], "`nvidia-smi` printed something else than its table"
    users = _users(system) if found else ()
    numbers = [part.strip() for part in (visible or "").split(",") if part.strip()]
    chosen = [gpu for gpu in found if not numbers or str(gpu.index) in numbers or not numbers[0].isdigit()]
    ordered = sorted(chosen, key=lambda gpu: numbers.index(str(gpu.index)) if str(gpu.index) in numbers else gpu.index)
    # torch counts the visible GPUs from 0.
    return [
        Gpu(number, *_fields(gpu), users=users if len(found) == 1 else ()) for number, gpu in enumerate(ordered)
    ], None


def _fields(gpu: Gpu) -> tuple[str, int, int, tuple[int, int], str, float | None]:
    return gpu.name, gpu.memory_bytes, gpu.free_bytes, gpu.capability, gpu.driver, gpu.busy_share


def _parse_gpu(line: str) -> Gpu:
    index, name, total, free, capability, driver, *busy = (part.strip() for part in line.split(","))
    card = match_card(name)
    known = parse_capability(capability) if re.fullmatch(r"\d+\.\d+", capability) else None
    share = float(busy[0]) / 100 if busy and re.fullmatch(r"\d+", busy[0]) else None
    total_bytes, free_bytes = int(total) << 20, int(free) << 20
    if not 0 <= free_bytes <= total_bytes or not total_bytes:
        raise ValueError("memory")
    own = known or (card.capability if card else (0, 0))
    return Gpu(int(index), name, total_bytes, free_bytes, own, driver, share)


def _users(system: System) -> tuple[str, ...]:
    command = ["nvidia-smi", "--query-compute-apps=process_name,used_memory", "--format=csv,noheader,nounits"]
    lines = (_try(system, command) or "").strip().splitlines()
    pairs = [line.rpartition(",")[::2] for line in lines]
    return tuple(
        f"{name.strip().rpartition('/')[2]} ({int(size) / 1024:.1f} GiB)"
        for name, size in ((name, size.strip()) for name, size in pairs)
        if size.isdigit()
    )
