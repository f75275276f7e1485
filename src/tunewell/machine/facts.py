"""Facts about this machine, read without torch: CPU, cores, memory, bf16 units, library versions."""

import math
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

_CGROUP = "/sys/fs/cgroup"
_FLOPS_PER_CYCLE = {"avx512f": 64, "fma": 32, "avx": 16}
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})


@dataclass(frozen=True)
class DeviceFacts:
    """The properties of a device. Values that the system does not report are None."""

    kind: Literal["cpu", "cuda", "mps"]
    name: str
    """torch's name: `cpu`, `cuda:0`, `mps`."""
    label: str
    """The product name: `NVIDIA H200`."""
    memory_bytes: int | None
    free_bytes: int | None
    has_bf16: bool = False
    """Whether the device has bf16 units. torch accepts bf16 everywhere, but a CPU without them is 50 times slower."""
    has_flash: bool = False
    """Whether the device supports torch's variable-length flash attention."""
    is_here: bool = True
    """Whether it is a device of this machine, on which this machine's packages are installed."""
    host_bytes: int | None = None
    """Free main memory of the machine with this GPU; None if it is not a limit."""


def read_system_file(path: str) -> str:
    """Return the text of a system file, or an empty text if the file does not exist."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


_Reader = Callable[[str], str]
_CPUINFO = "/proc/cpuinfo"


def cpu_facts(read: _Reader = read_system_file) -> DeviceFacts:
    """Return the facts of the CPU of a machine whose system files `read` returns."""
    total, free, _ = main_memory(read)
    cpuinfo = read(_CPUINFO)
    named = re.search(r"^model name\s*:\s*(\S.*)$", cpuinfo, re.MULTILINE)
    label = named[1].strip() if named else platform.processor() or platform.machine() or "CPU"
    return DeviceFacts("cpu", "cpu", label, total, free, has_bf16=has_real_bf16(cpuinfo))


def gpu_facts(
    name: str, label: str, total: int, free: int, *, capability: tuple[int, int], is_here: bool = True
) -> DeviceFacts:
    """Return the facts of an NVIDIA GPU. bf16 units and the flash kernel came with the Ampere generation."""
    is_new = capability >= (8, 0)
    return DeviceFacts("cuda", name, label, total, free, has_bf16=is_new, has_flash=is_new, is_here=is_here)


def apple_facts(total: int, free: int) -> DeviceFacts:
    """Return the facts of an Apple GPU. bf16 is off until it has been compared with fp32 on such a machine."""
    return DeviceFacts("mps", "mps", "Apple GPU", total, free)


def num_cores() -> int:
    """Return the number of cores that this process may run on. The machine can have more cores."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    found: dict[str, str] = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def has_real_bf16(cpuinfo: str) -> bool:
    """Return True if the text of `/proc/cpuinfo` lists bf16 units."""
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    return flags is not None and not _BF16_FLAGS.isdisjoint(flags[1].split())


def usable_cores(cgroup: str = _CGROUP) -> int:
    """Return the number of usable cores: the CPU affinity of this process, or the container's quota if it is lower."""
    quota, _, period = read_system_file(f"{cgroup}/cpu.max").strip().partition(" ")
    if not (quota.isdigit() and period.isdigit() and int(period)):
        return num_cores()
    return max(1, min(num_cores(), math.ceil(int(quota) / int(period))))


def physical_cores(cpuinfo: str | None = None) -> int | None:
    """Return the number of physical cores, without hyper-threads, or None if the system does not report it."""
    text = read_system_file(_CPUINFO) if cpuinfo is None else cpuinfo
    sockets = re.findall(r"^physical id\s*:\s*(\d+)$", text, re.MULTILINE)
    cores = re.findall(r"^core id\s*:\s*(\d+)$", text, re.MULTILINE)
    return len(set(zip(sockets, cores, strict=False))) or None


def cpu_flops(cpuinfo: str | None = None, *, cores: int | None = None, load: float | None = None) -> float:
    """Estimate the rate of fp32 products on the cores that other processes leave, in FLOP/s.

    Without arguments for this machine. Measured shares of the peak were 0.57 to 0.75 (2 cores of a Xeon with AVX-512)
    and 0.68 (2 cores of an EPYC, AVX2).
    """
    if cpuinfo is None:
        cpuinfo, load = read_system_file(_CPUINFO), load_average()
    clock = re.search(r"^cpu MHz\s*:\s*([\d.]+)$", cpuinfo, re.MULTILINE)
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    per_cycle = next((rate for flag, rate in _FLOPS_PER_CYCLE.items() if flags and flag in flags[1].split()), 16)
    cores = cores or usable_cores()
    return 0.65 * cores * float(clock[1] if clock else 3000) * 1e6 * per_cycle / max(1.0, (load or 0.0) / cores)


def load_average() -> float | None:
    """Return the load average of the last minute, or None on Windows."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def peak_memory_bytes() -> int | None:
    """Return the peak memory of this process so far, or None on Windows."""
    # getrusage is not used on Linux: its peak survives exec, so it would include the memory of the parent process.
    if peak := re.search(r"^VmHWM:\s*(\d+) kB$", read_system_file("/proc/self/status"), re.MULTILINE):
        return int(peak[1]) * 1024
    if sys.platform == "win32":
        return None
    import resource

    # ru_maxrss is in bytes on macOS and in KiB elsewhere.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def process_seconds() -> float | None:
    """Return the age of this process in seconds, or None if the system does not report it."""
    fields = read_system_file("/proc/self/stat").rpartition(")")[2].split()
    uptime = read_system_file("/proc/uptime").split()
    if len(fields) < 20 or not uptime:
        return None
    return max(0.0, float(uptime[0]) - int(fields[19]) / os.sysconf("SC_CLK_TCK"))


def main_memory(read: _Reader = read_system_file, cgroup: str = _CGROUP) -> tuple[int | None, int | None, int | None]:
    """Return total and available memory in bytes, and the container's limit if it is lower; the total is then that."""
    lines = re.findall(r"^(\w+):\s*(\d+) kB$", read("/proc/meminfo"), re.MULTILINE)
    known = {name: int(kib) * 1024 for name, kib in lines}
    total, free = known.get("MemTotal", _installed_memory()), known.get("MemAvailable")
    for folder, limit_name, used_name, cache in (
        (cgroup, "memory.max", "memory.current", "inactive_file"),
        (f"{cgroup}/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = read(f"{folder}/{limit_name}").strip(), read(f"{folder}/{used_name}").strip()
        if limit.isdigit() and used.isdigit() and total is not None and int(limit) < total:
            # The page cache counts as used but is freed on demand.
            cached = re.search(rf"^{cache} (\d+)$", read(f"{folder}/memory.stat"), re.MULTILINE)
            left = max(0, int(limit) - int(used) + (int(cached[1]) if cached else 0))
            return int(limit), left if free is None else min(left, free), int(limit)
    return total, free, None


def _installed_memory() -> int | None:
    known = {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= {*getattr(os, "sysconf_names", ())}
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if known else None
