"""Keep two commands from working in one folder at once."""

import errno
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TextIO

from tunewell.core.errors import UserError

try:
    import fcntl
except ImportError:  # Windows has no flock; there the operating system's own file sharing rules apply
    fcntl = None

# What a file system without locks (some network disks) answers.
_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP})


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


@dataclass(frozen=True)
class Owner:
    """Who holds a folder."""

    pid: int
    host: str
    since: str

    @classmethod
    def this_process(cls) -> "Owner":
        """Describe the process that asks."""
        return cls(os.getpid(), socket.gethostname(), datetime.now().astimezone().isoformat(" ", "seconds"))

    def __str__(self) -> str:
        place = "" if self.host == socket.gethostname() else f" on {self.host}"
        return f"process {self.pid}{place}, since {self.since}"


class FolderLock:
    """A lock held until `release`, or until the process that holds it ends in whatever way.

    The file says who holds it: process, machine and start. It stays when the lock is released, and means nothing then.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file

    @classmethod
    def take(cls, path: Path, *, doing: str) -> "FolderLock":
        """Take the lock; raise UserError, naming the owner, if a living process holds it."""
        file = path.open("a+", encoding="utf-8", errors="replace")
        try:
            is_held = _is_held(file)
            file.seek(0)
            owner = _read_owner(file.read())
            if is_held or (is_held is None and owner is not None and _may_live(owner)):
                raise UserError(
                    f"another process is {doing}",
                    where=str(owner or "unknown process"),
                    fix="wait for it to end, or stop it"
                    + (f"; if that one is dead, delete `{path}`" if is_held is None else ""),
                )
            file.truncate(0)
            file.write(json.dumps(vars(Owner.this_process())) + "\n")
            file.flush()
        except BaseException:
            file.close()
            raise
        return cls(file)

    def release(self) -> None:
        """Let the next one in; a second call does nothing."""
        if not self._file.closed:
            with suppress(OSError):  # a disk that cannot be written any more: closing is what lets the next one in
                self._file.truncate(0)  # where the file system has no locks, the name in the file is the lock
            self._file.close()


def _is_held(file: TextIO) -> bool | None:
    """Try to lock an open file: False if it is ours now, True if it is another's, None where there are no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return None if error.errno in _NO_LOCKS else True
    return False


def _read_owner(text: str) -> Owner | None:
    try:
        return Owner(**json.loads(text))
    except (ValueError, TypeError):
        return None  # released, or its owner died while writing it


def _may_live(owner: Owner) -> bool:
    """Say whether an owner may still be at work; one on another machine may."""
    if owner.host != socket.gethostname():
        return True
    if os.name == "nt":
        return False  # signal 0 would end it
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's, and alive
    return True
