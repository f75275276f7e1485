"""Read the facts of the machine for the checks: NVIDIA driver and GPUs, memory, disks, environment variables."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tunewell.environment.facts import Disk, Gpu, Machine, SmiState
from tunewell.hardware.facts import cpu_facts

_QUERY = "name,driver_version,memory.total,memory.free,compute_cap"
_SMI_SECONDS = 10.0
"""Without persistence mode, the driver is loaded first: 5 s were seen on machines with eight GPUs."""
_HUB_SECONDS = 3
_NVIDIA, _DISPLAY_CLASS = "0x10de", "0x03"
_VARIABLES = (
    *("BNB_CUDA_VERSION", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_ENDPOINT"),
    *("LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH", "PYTHONNOUSERSITE"),
)


def read_machine(folders: Mapping[str, Path], *, is_fast: bool = False) -> Machine:
    """Return the facts of this machine. `is_fast` does not start nvidia-smi. `folders`: purpose -> folder of a run."""
    cpu = cpu_facts()
    answer: tuple[SmiState, str, list[Gpu]] = ("not asked", "", []) if is_fast else query_gpus()
    return Machine(
        smi=answer[0],
        smi_message=answer[1],
        gpus=answer[2],
        kernel_driver=_kernel_driver(_read("/proc/driver/nvidia/version")),
        num_pci_gpus=0 if is_fast else _pci_gpus(Path("/sys/bus/pci/devices")),
        is_wsl="microsoft" in _read("/proc/version").lower(),
        memory_bytes=cpu.memory_bytes,
        free_memory_bytes=cpu.free_bytes,
        shared_memory_bytes=_total(Path("/dev/shm")),
        disks=[disk for purpose, folder in folders.items() if (disk := _disk(purpose, folder))],
        variables={name: os.environ[name] for name in _VARIABLES if os.environ.get(name)},
    )


def query_gpus(seconds: float = _SMI_SECONDS) -> tuple[SmiState, str, list[Gpu]]:
    """Ask nvidia-smi; return a state of `Machine.smi`, its message, and the GPUs."""
    program = shutil.which("nvidia-smi") or _wsl_program()
    if program is None:
        return "missing", "", []
    command = [program, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except OSError as error:
        return "fails", str(error), []
    try:
        # Not `subprocess.run`, which waits for ever for a process that the driver has blocked.
        text = child.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        child.kill()
        return "hangs", f"no answer within {seconds:g} s", []
    except UnicodeDecodeError as error:
        return "fails", str(error), []
    if child.returncode:
        return "fails", " ".join(text.split())[:300] or f"exit code {child.returncode}", []
    return parse_gpus(text)


def parse_gpus(text: str) -> tuple[SmiState, str, list[Gpu]]:
    """Parse the table of nvidia-smi. Memory is in MiB; what a GPU does not report is `[N/A]`."""
    gpus: list[Gpu] = []
    for line in text.strip().splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 5 or not re.match(r"\d+\.", cells[1]):
            return "unreadable", line[:120], []
        name, driver, total, free, capability = cells
        version = re.fullmatch(r"(\d+)\.(\d+)", capability)
        gpus.append(
            Gpu(
                name=name,
                driver=driver,
                memory_bytes=int(total) << 20 if total.isdigit() else 0,
                free_bytes=int(free) << 20 if free.isdigit() else 0,
                capability=(int(version[1]), int(version[2])) if version else None,
            )
        )
    return "ok", "", gpus


def hub_problem() -> str | None:
    """Return why the hub cannot be reached, or None if it can. A proxy is trusted."""
    import socket  # not needed in the fast part, whose imports count
    import urllib.parse
    import urllib.request

    address = urllib.parse.urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    if urllib.request.getproxies():
        return None
    try:
        port = address.port or (80 if address.scheme == "http" else 443)
        socket.create_connection((address.hostname or "", port), timeout=_HUB_SECONDS).close()
    except (OSError, ValueError) as error:
        return f"{address.hostname} cannot be reached ({getattr(error, 'strerror', None) or error})"
    return None


def _wsl_program() -> str | None:
    path = Path("/usr/lib/wsl/lib/nvidia-smi")
    return str(path) if path.is_file() else None


def _kernel_driver(text: str) -> str | None:
    found = re.search(r"Kernel Module(?: for \w+)?\s+(\d+\.[\d.]+)", text)
    return found[1] if found else None


def _pci_gpus(devices: Path) -> int:
    folders = devices.iterdir() if devices.is_dir() else ()
    return sum(
        _read(folder / "vendor").strip() == _NVIDIA and _read(folder / "class").startswith(_DISPLAY_CLASS)
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


def _total(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).total if folder.is_dir() else None
    except OSError:
        return None


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
