"""Facts about this machine, read without torch: CPU, cores, memory, bf16 units, library versions."""

import math
import os
import platform
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

_CGROUP = Path("/sys/fs/cgroup")
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
    has_bf16: bool
    """Whether the device has bf16 units. torch accepts bf16 everywhere, but a CPU without them is 50 times slower."""
    has_flash: bool
    """Whether the device supports torch's variable-length flash attention."""
    is_here: bool = True
    """Whether it is a device of this machine, on which this machine's packages are installed."""
    host_bytes: int | None = None
    """Free main memory of the machine with this GPU; None if it is not a limit."""


def cpu_facts() -> DeviceFacts:
    """Return the facts of the CPU of this machine."""
    total, free = _ram()
    has_bf16 = has_real_bf16(_read(Path("/proc/cpuinfo")))
    return DeviceFacts("cpu", "cpu", cpu_label(), total, free, has_bf16=has_bf16, has_flash=False)


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


def cpu_label() -> str:
    """Return the product name of the CPU, or the best available description."""
    named = re.search(r"^model name\s*:\s*(\S.*)$", _read(Path("/proc/cpuinfo")), re.MULTILINE)
    return named[1].strip() if named else platform.processor() or platform.machine() or "CPU"


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """Return the number of usable cores: the CPU affinity of this process, or the container's quota if it is lower."""
    quota, _, period = _read(cgroup / "cpu.max").strip().partition(" ")
    if not (quota.isdigit() and period.isdigit() and int(period)):
        return num_cores()
    return max(1, min(num_cores(), math.ceil(int(quota) / int(period))))


def physical_cores(cpuinfo: str | None = None) -> int | None:
    """Return the number of physical cores, without hyper-threads, or None if the system does not report it."""
    text = _read(Path("/proc/cpuinfo")) if cpuinfo is None else cpuinfo
    sockets = re.findall(r"^physical id\s*:\s*(\d+)$", text, re.MULTILINE)
    cores = re.findall(r"^core id\s*:\s*(\d+)$", text, re.MULTILINE)
    return len(set(zip(sockets, cores, strict=False))) or None


def cpu_flops(cpuinfo: str | None = None, *, cores: int | None = None, load: float | None = None) -> float:
    """Estimate the rate of fp32 products on the cores that other processes leave, in FLOP/s.

    Without arguments for this machine. Measured shares of the peak were 0.57 to 0.75 (2 cores of a Xeon with AVX-512)
    and 0.68 (2 cores of an EPYC, AVX2).
    """
    if cpuinfo is None:
        cpuinfo, load = _read(Path("/proc/cpuinfo")), os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    clock = re.search(r"^cpu MHz\s*:\s*([\d.]+)$", cpuinfo, re.MULTILINE)
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    per_cycle = next((rate for flag, rate in _FLOPS_PER_CYCLE.items() if flags and flag in flags[1].split()), 16)
    cores = cores or usable_cores()
    return 0.65 * cores * float(clock[1] if clock else 3000) * 1e6 * per_cycle / max(1.0, (load or 0.0) / cores)


def peak_memory_bytes() -> int | None:
    """Return the peak memory of this process so far, or None on Windows."""
    # getrusage is not used on Linux: its peak survives exec, so it would include the memory of the parent process.
    if peak := re.search(r"^VmHWM:\s*(\d+) kB$", _read(Path("/proc/self/status")), re.MULTILINE):
        return int(peak[1]) * 1024
    if sys.platform == "win32":
        return None
    import resource

    # ru_maxrss is in bytes on macOS and in KiB elsewhere.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def process_seconds() -> float | None:
    """Return the age of this process in seconds, or None if the system does not report it."""
    fields = _read(Path("/proc/self/stat")).rpartition(")")[2].split()
    uptime = _read(Path("/proc/uptime")).split()
    if len(fields) < 20 or not uptime:
        return None
    return max(0.0, float(uptime[0]) - int(fields[19]) / os.sysconf("SC_CLK_TCK"))


def _ram(cgroup: Path = _CGROUP) -> tuple[int | None, int | None]:
    """Return total and free memory in bytes, of the container if it has less than the machine."""
    lines = re.findall(r"^(\w+):\s*(\d+) kB$", _read(Path("/proc/meminfo")), re.MULTILINE)
    known = {name: int(kib) * 1024 for name, kib in lines}
    total, free = known.get("MemTotal", _pages("SC_PHYS_PAGES")), known.get("MemAvailable")
    limit, used = _read(cgroup / "memory.max").strip(), _read(cgroup / "memory.current").strip()
    if limit.isdigit() and used.isdigit() and total is not None and int(limit) < total:
        # The page cache counts as used but is freed on demand.
        stat = re.search(r"^inactive_file (\d+)$", _read(cgroup / "memory.stat"), re.MULTILINE)
        left = int(limit) - int(used) + (int(stat[1]) if stat else 0)
        return int(limit), max(0, left if free is None else min(left, free))
    return total, free


def _pages(name: str) -> int | None:
    if name not in getattr(os, "sysconf_names", {}):
        return None
    return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")


def _read(path: Path) -> str:
    """Return the text of a system file, or an empty text if the file does not exist."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
