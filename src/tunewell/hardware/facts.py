"""What this machine and its device are, read without torch."""

import math
import os
import platform
import re
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

# How many processor cores this process may use.


def num_cores() -> int:
    """Count the cores this process may run on, which can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_LIBRARIES = ("tunewell", "torch", "transformers", "peft", "safetensors", "tokenizers", "numpy", "pyarrow")
_CGROUP = Path("/sys/fs/cgroup")
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})


@dataclass(frozen=True)
class MachineFacts:
    """A machine as this process sees it; None where the system does not say."""

    cpu: str
    num_cores: int
    """Cores this process may keep busy: its affinity, and the quota of its container."""
    ram_bytes: int | None
    """The machine's, or the limit of the container where that is less."""
    free_ram_bytes: int | None
    system: str
    python: str
    libraries: dict[str, str]
    """Installed version by name; a library that is not installed is absent."""


@dataclass(frozen=True)
class DeviceFacts:
    """What a run computes on."""

    kind: Literal["cpu", "cuda", "mps"]
    name: str
    """As torch knows it: `cpu`, `cuda:0`, `mps`."""
    label: str
    """As people know it: `NVIDIA H200`."""
    memory_bytes: int | None
    free_bytes: int | None
    has_bf16: bool
    """Computes in bf16 itself. Every device of torch's takes bf16; without units for it a CPU is 50 times slower."""
    has_flash: bool
    """Runs torch's flash attention over documents of different lengths."""
    capability: tuple[int, int] | None = None
    """CUDA's number for the generation: (8, 0) is Ampere."""


def read_machine() -> MachineFacts:
    """Read what this machine is."""
    total, free = _ram()
    return MachineFacts(
        cpu=cpu_label(),
        num_cores=usable_cores(),
        ram_bytes=total,
        free_ram_bytes=free,
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        libraries=library_versions(),
    )


def cpu_facts() -> DeviceFacts:
    """Describe this machine's CPU as a device to train on."""
    total, free = _ram()
    has_bf16 = has_real_bf16(_read(Path("/proc/cpuinfo")))
    return DeviceFacts("cpu", "cpu", cpu_label(), total, free, has_bf16=has_bf16, has_flash=False)


def library_versions() -> dict[str, str]:
    """List the installed versions of the libraries that a result depends on."""
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def has_real_bf16(cpuinfo: str) -> bool:
    """Tell from the text of `/proc/cpuinfo` whether the CPU multiplies bf16 itself."""
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    return flags is not None and not _BF16_FLAGS.isdisjoint(flags[1].split())


def cpu_label() -> str:
    """Give the CPU's name as its maker writes it, or what comes nearest."""
    named = re.search(r"^model name\s*:\s*(\S.*)$", _read(Path("/proc/cpuinfo")), re.MULTILINE)
    return named[1].strip() if named else platform.processor() or platform.machine() or "CPU"


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """Count the cores this process may keep busy: those it may run on, or its container's share where that is less."""
    quota, _, period = _read(cgroup / "cpu.max").strip().partition(" ")
    if not (quota.isdigit() and period.isdigit() and int(period)):
        return num_cores()
    return max(1, min(num_cores(), math.ceil(int(quota) / int(period))))


def physical_cores(cpuinfo: str | None = None) -> int | None:
    """Count cores without their second threads; None where the system does not say."""
    text = _read(Path("/proc/cpuinfo")) if cpuinfo is None else cpuinfo
    sockets = re.findall(r"^physical id\s*:\s*(\d+)$", text, re.MULTILINE)
    cores = re.findall(r"^core id\s*:\s*(\d+)$", text, re.MULTILINE)
    return len(set(zip(sockets, cores, strict=False))) or None


def peak_memory_bytes() -> int | None:
    """Give the most memory this process has held so far; None on Windows."""
    # getrusage would also count what the parent held before it started us: Linux keeps its peak over exec.
    if peak := re.search(r"^VmHWM:\s*(\d+) kB$", _read(Path("/proc/self/status")), re.MULTILINE):
        return int(peak[1]) * 1024
    if sys.platform == "win32":
        return None
    import resource

    # In bytes on macOS, in KiB elsewhere.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _ram(cgroup: Path = _CGROUP) -> tuple[int | None, int | None]:
    """Give total and free bytes, those of the container where it has less than the machine."""
    lines = re.findall(r"^(\w+):\s*(\d+) kB$", _read(Path("/proc/meminfo")), re.MULTILINE)
    known = {name: int(kib) * 1024 for name, kib in lines}
    total, free = known.get("MemTotal", _pages("SC_PHYS_PAGES")), known.get("MemAvailable")
    limit, used = _read(cgroup / "memory.max").strip(), _read(cgroup / "memory.current").strip()
    if limit.isdigit() and used.isdigit() and total is not None and int(limit) < total:
        # Pages of files that were only read count as used, and go when memory is asked for.
        stat = re.search(r"^inactive_file (\d+)$", _read(cgroup / "memory.stat"), re.MULTILINE)
        left = int(limit) - int(used) + (int(stat[1]) if stat else 0)
        return int(limit), max(0, left if free is None else min(left, free))
    return total, free


def _pages(name: str) -> int | None:
    if name not in getattr(os, "sysconf_names", {}):
        return None
    return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")


def _read(path: Path) -> str:
    """Read a file of the system's; empty where this system has none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
