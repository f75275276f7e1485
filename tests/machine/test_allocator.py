"""Freed memory stays with the process, and nothing else changes."""

import subprocess
import sys

from tunewell.machine.allocator import keep_freed_memory

_SCRIPT = """
import resource, torch
from tunewell.machine.allocator import keep_freed_memory

def work():
    total, before = torch.zeros(()), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        total += torch.ones(12_000_000).sum()
    print(int(total), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

torch.set_num_threads(1)
work()
assert keep_freed_memory(4 << 30)
work()
"""


def test_memory_is_taken_from_the_system_once() -> None:
    """Elsewhere than on Linux the allocator is left alone, and says so."""
    if not sys.platform.startswith("linux"):
        assert not keep_freed_memory(4 << 30)
        return
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True)
    (plain, many), (kept, few) = ([int(word) for word in line.split()] for line in done.stdout.splitlines())
    assert plain == kept == 8 * 12_000_000
    assert few < many / 4
