"""The files, variables and programs of a machine, from which its facts are read. Tests replay recorded ones."""

import os
import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tunewell.core.child import run
from tunewell.machine.facts import usable_cores

_WSL_PROGRAMS = "/usr/lib/wsl/lib/"
"""Where WSL has nvidia-smi; the folder is not on every PATH."""


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
        """Return the output of a program, or None if it does not exist.

        Raise TimeoutError if it hangs, and OSError if it fails, with the reason as message.
        """
        program = shutil.which(command[0]) or shutil.which(_WSL_PROGRAMS + command[0])
        if program is None:
            return None
        done = run([program, *command[1:]], seconds=seconds, merges_errors=True)
        if done.code:
            raise OSError(" ".join(done.out.split())[:300] or f"exit code {done.code}")
        return done.out

    def free_disk(self, path: str) -> int | None:
        """Return the free bytes of the file system of a path, or None if it does not exist."""
        try:
            return shutil.disk_usage(path).free
        except OSError:
            return None

    def total_disk(self, path: str) -> int | None:
        """Return the size of the file system of a path, or None if it does not exist."""
        try:
            return shutil.disk_usage(path).total
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
