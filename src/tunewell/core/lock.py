"""A lock file that keeps two processes from working in one folder."""

import errno
import json
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TextIO

from tunewell.core.errors import UserError

try:
    import fcntl
except ImportError:  # Windows has no flock
    fcntl = None

# The errors of a file system without locks (some network disks).
_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP})


@dataclass(frozen=True)
class Owner:
    """The process that holds a lock."""

    pid: int
    host: str
    since: str

    @classmethod
    def this_process(cls) -> "Owner":
        """Describe the current process."""
        return cls(os.getpid(), socket.gethostname(), datetime.now().astimezone().isoformat(" ", "seconds"))

    def __str__(self) -> str:
        host = "" if self.host == socket.gethostname() else f" on {self.host}"
        return f"process {self.pid}{host}, since {self.since}"


class FolderLock:
    """A lock that is held until `release`, the end of a `with` block, or the end of the process.

    The file names the owner: process, host and start time. It is emptied on release and never deleted.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file

    @classmethod
    def take(cls, path: Path, *, doing: str) -> "FolderLock":
        """Take the lock; raise UserError with the owner if a running process holds it."""
        file = path.open("a+", encoding="utf-8", errors="replace")
        try:
            is_locked = _is_locked_by_other(file)
            file.seek(0)
            owner = _read_owner(file.read())
            if is_locked or (is_locked is None and owner is not None and _may_be_running(owner)):
                raise UserError(
                    f"another process is {doing}",
                    where=str(owner or "unknown process"),
                    fix="wait for it to end, or stop it"
                    + (f"; if it is no longer running, delete `{path}`" if is_locked is None else ""),
                )
            file.truncate(0)
            file.write(json.dumps(vars(Owner.this_process())) + "\n")
            file.flush()
        except BaseException:
            file.close()
            raise
        return cls(file)

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if not self._file.closed:
            with suppress(OSError):  # a full disk: closing the file releases the lock all the same
                self._file.truncate(0)  # on a file system without locks the owner in the file is the lock
            self._file.close()

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _is_locked_by_other(file: TextIO) -> bool | None:
    """Try to lock an open file: False if this process has the lock now, None if the file system has no locks."""
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
        return None  # released, or the owner died while writing


def _may_be_running(owner: Owner) -> bool:
    """Return False only if the owner certainly ended; the processes of another host are unknown."""
    if owner.host != socket.gethostname():
        return True
    if os.name == "nt":
        return False  # on Windows signal 0 would end the process
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it runs as another user
    return True
