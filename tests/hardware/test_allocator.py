"""Freed memory stays with the process, and nothing else changes."""

import subprocess
import sys

from tunewell.hardware.allocator import keep_freed_memory

_SCRIPT = """
import resource, sys, torch
from tunewell.hardware.allocator import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory(4 << 30)
torch.set_num_threads(1)
total = torch.zeros(())
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    total += torch.ones(12_000_000).sum()
print(int(total), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _run(mode: str) -> tuple[int, int]:
    done = subprocess.run([sys.executable, "-c", _SCRIPT, mode], capture_output=True, text=True, check=True)
    result, faults = done.stdout.split()
    return int(result), int(faults)


def test_memory_is_taken_from_the_system_once() -> None:
    """Elsewhere than on Linux the allocator is left alone, and says so."""
    if not sys.platform.startswith("linux"):
        assert not keep_freed_memory(4 << 30)
        return
    (plain, many), (kept, few) = _run("plain"), _run("kept")
    assert plain == kept == 20 * 12_000_000
    assert few < many / 4
