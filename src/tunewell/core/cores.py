"""How many processor cores this process may use."""

import os


def num_cores() -> int:
    """Count the cores this process may run on, which can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
