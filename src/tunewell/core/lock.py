"""Keep two commands from working in one folder at once."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tunewell.core.errors import UserError

try:
    import fcntl
except ImportError:  # Windows has no flock; there the operating system's own file sharing rules apply
    fcntl = None


@contextmanager
def only_one(path: Path, *, doing: str) -> Iterator[None]:
    """Hold a lock file while the body runs; a lock whose owner died is free at once.

    Raises UserError if another process holds it.
    """
    with path.open("a+") as file:
        if fcntl:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                file.seek(0)
                owner = file.read().strip() or "unknown"
                raise UserError(
                    f"another process is {doing}", where=f"process {owner}", fix="wait for it to end, or stop it"
                ) from error
        file.seek(0)
        file.truncate()
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield
