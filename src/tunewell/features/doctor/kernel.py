"""Find packages that a notebook kernel imported before they were replaced on disk."""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from tunewell.features.doctor.facts import public_version
from tunewell.features.doctor.packages import STACK, normalize
from tunewell.machine.system import System

_KERNELS = ("ipykernel", "colab_kernel")
_MAX_ANCESTORS = 20


def held_in_this_process(installed: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return the packages that this process holds in another version than the installed one."""
    found: list[tuple[str, str, str]] = []
    for name, module in STACK.items():
        held, now = getattr(sys.modules.get(module), "__version__", None), installed.get(name)
        if isinstance(held, str) and now is not None and public_version(held) not in (None, public_version(now)):
            found.append((name, held, now))
    return found


def held_by_parent_kernel(installed: Mapping[str, str], proc: Path = Path("/proc")) -> list[tuple[str, str, str]]:
    """Return the packages whose replaced libraries the notebook kernel that started this process still maps.

    The kernel's maps show a replaced library as deleted. Packages without a compiled library are not seen: for them,
    call `tunewell.doctor()` in the notebook itself.
    """
    kernel = _kernel_process(proc)
    if kernel is None:
        return []
    lines = re.findall(
        r"(?:site|dist)-packages/([\w.]+?)/\S+ \(deleted\)$", System().read(f"{kernel}/maps"), re.MULTILINE
    )
    names = {normalize(line) for line in lines}
    modules = {normalize(module): name for name, module in STACK.items()}
    return [
        (modules[name], "an older version", installed[modules[name]])
        for name in sorted(names)
        if name in modules and modules[name] in installed
    ]


def _kernel_process(proc: Path) -> Path | None:
    """Return the nearest ancestor process that is a notebook kernel; None outside of notebooks and Linux."""
    process = os.getppid()
    for _ in range(_MAX_ANCESTORS):
        folder = proc / str(process)
        if any(name in System().read(f"{folder}/cmdline") for name in _KERNELS):
            return folder
        parent = re.search(r"^PPid:\s*(\d+)", System().read(f"{folder}/status"), re.MULTILINE)
        if parent is None or int(parent[1]) <= 1:
            return None
        process = int(parent[1])
    return None
