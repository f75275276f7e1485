"""Read the environment variables that a launcher such as torchrun sets."""

import os

_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")


def is_launched() -> bool:
    """Return True if a launcher started this process, even as the only one."""
    return any(name in os.environ for name in _VARIABLES)


def world_size() -> int:
    """Return the number of processes that a launcher started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Return True on rank 0, the only process of a distributed run that prints."""
    return world_size() <= 1 or os.environ.get("RANK", "0") == "0"


def num_restarts() -> int:
    """Return how often torchrun has restarted the processes (`--max-restarts`)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
