"""A disk that fills up, one that dies, and a process that is killed, at a chosen write of a run."""

import errno
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

WRITES = [(os, "mkdir"), (os, "write"), (os, "fsync"), (os, "rename"), (os, "replace")]
REMOVALS = [(os, "unlink"), (os, "rmdir")]
"""Every call by which a run changes the disk; for `fault_points.failing`."""


@contextmanager
def disk_with(room: int) -> Iterator[list[int]]:
    """Let so many bytes be written; the write that would go beyond writes a part, and all later ones nothing.

    Gives a list of the sizes of all that was written.
    """
    original, sizes = os.write, []

    def write(handle: int, data: Any) -> int:
        free = room - sum(sizes)
        if len(data) and free <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        sizes.append(original(handle, data[:free]))
        return sizes[-1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "write", write)
        yield sizes


@contextmanager
def broken(places: list[tuple[Any, str]], number: int, *, times: int = 1_000_000) -> Iterator[list[int]]:
    """Let every call of these places fail with an error number, so many times; gives a list that grows with each."""
    failed: list[int] = []

    def failing(original: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            if len(failed) >= times:
                return original(*arguments, **options)
            failed.append(1)
            raise OSError(number, os.strerror(number))

        return call

    with pytest.MonkeyPatch.context() as patched:
        for owner, name in places:
            patched.setattr(owner, name, failing(getattr(owner, name)))
        yield failed


def kill_this_process_at(call: int) -> None:
    """End this process by SIGKILL just before its so-manyth change of the disk; the first is 0."""
    done = [0]

    def killing(original: Any) -> Any:
        def act(*arguments: Any, **options: Any) -> Any:
            if done[0] == call:
                os.kill(os.getpid(), signal.SIGKILL)
            done[0] += 1
            return original(*arguments, **options)

        return act

    for owner, name in WRITES + REMOVALS:
        setattr(owner, name, killing(getattr(owner, name)))
