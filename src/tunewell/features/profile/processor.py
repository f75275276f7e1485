"""How long this thread was ready to run while other programs used the processor."""

import os
from pathlib import Path

_SCHEDSTAT = Path("/proc/thread-self/schedstat")
"""Seconds on the processor and in the run queue in nanoseconds, and the number of time slices. Linux only."""


class ProcessorWait:
    """The time of one thread in the run queue. Reading it takes a few microseconds."""

    def __init__(self, path: Path = _SCHEDSTAT) -> None:
        try:
            self._file = os.open(path, os.O_RDONLY)
        except OSError:
            self._file = -1

    def seconds(self) -> float:
        """Return the seconds that the thread has waited so far; 0 if the system does not count them."""
        if self._file < 0:
            return 0.0
        fields = os.pread(self._file, 128, 0).split()
        return int(fields[1]) / 1e9 if len(fields) > 1 else 0.0

    def close(self) -> None:
        """Close the file; the time is 0 from now on."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
