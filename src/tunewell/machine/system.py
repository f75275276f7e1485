"""The files, variables and programs of a machine, from which its facts are read. Tests replay recorded ones."""

import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress

from tunewell.core.child import run
from tunewell.machine.facts import installed_versions, load_average, read_system_file, usable_cores

_WSL_PROGRAMS = "/usr/lib/wsl/lib/"
"""Where WSL has nvidia-smi; the folder is not on every PATH."""


class System:
    """The files, variables and programs of the machine."""

    platform = sys.platform

    def read(self, path: str) -> str:
        """Return the text of a file, or an empty text if it does not exist."""
        return read_system_file(path)

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
        with suppress(OSError):
            return shutil.disk_usage(path).free

    def total_disk(self, path: str) -> int | None:
        """Return the size of the file system of a path, or None if it does not exist."""
        with suppress(OSError):
            return shutil.disk_usage(path).total

    def installed(self, package: str) -> str | None:
        """Return the version of an installed package, or None."""
        return installed_versions([package]).get(package)

    def cores(self) -> int:
        """Return the number of usable cores."""
        return usable_cores()

    def load(self) -> float | None:
        """Return the load average of the last minute, or None on Windows."""
        return load_average()
