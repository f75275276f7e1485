"""Opening of regular files, atomic writes, SHA-256 hashes, replacement of folders, folder locks, disk errors."""

import errno
import hashlib
import json
import os
import re
import shutil
import socket
import stat
import tomllib
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from tunewell.core.errors import UserError
from tunewell.core.units import size_bytes

_HASH_BLOCK_BYTES = 1 << 20
_WRITE_BLOCK_BYTES = 16 << 20
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_SHOWN_CHARS = 80
_ADDED_CHARS = 16
"""Characters that the name of a temporary folder adds to that of the output folder."""
_CANNOT_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP})
SYSTEM_FOLDERS = ("/dev/", "/proc/")
"""Folders of pipes and devices, which nobody deletes."""
_LOCK_START = '{"pid": '


def is_url(path: str) -> bool:
    """Return True for `scheme://...`. A URL must never be joined, normalised or made relative like a path."""
    return "://" in path


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/(?!.*\.[A-Za-z]\w*$)[\w.-]+")
"""The shape of `NAMESPACE/NAME`, without a file extension."""


def hub_address(path: str, base: Path) -> str:
    """Return `hf://datasets/NAMESPACE/NAME` for a hub id that cannot be a path; return any other path unchanged.

    It can be a path if the folder exists, or if the name has a file extension.
    """
    is_id = HUB_ID.fullmatch(path) is not None and not (base / path).parent.exists()
    return f"hf://datasets/{path}" if is_id else path


def short_path(path: Path) -> Path:
    """Return a path without `..` inside: `model` for `run/../model`, unless a link makes that another place."""
    short = Path(os.path.normpath(path))
    known, same = (path, short) if path.exists() else (path.parent, short.parent)
    return short if known.exists() and same.exists() and same.samefile(known) else path


class IrregularFile(UserError, OSError):
    """Raised for a pipe, a socket or a device in the place of a file. Reading a pipe may never end.

    It is an OSError, so that readers which tolerate a damaged file tolerate it too.
    """

    def __init__(self, path: str | Path) -> None:
        reason = "it is a pipe, a socket or a device, not a regular file"
        is_system = str(Path(path).absolute()).startswith(SYSTEM_FOLDERS)
        fix = "copy it to a file, and give that file" if is_system else f"delete `{path}`, or put a file there"
        super().__init__(f"`{path}` cannot be used: {reason}", fix=fix)
        self.strerror = reason


def open_handle(path: str | Path, flags: int) -> int:
    """Return a descriptor of a regular file. Folders are left to the caller. Opening a pipe does not block.

    Raises IrregularFile, or UserError for a link that would be written: its target may be any file of the user. A hard
    link that would be written is replaced by a copy.
    """
    is_written = flags & (os.O_WRONLY | os.O_RDWR)
    if is_written and Path(path).is_symlink():
        raise UserError(
            f"`{path}` is a link to `{os.path.realpath(path)}`; nothing is written through it",
            fix=f"delete the link `{path}`, and run the command again",
        )
    all_flags = flags & ~os.O_TRUNC
    for name in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY", "O_NOFOLLOW" if is_written else ""):
        all_flags |= getattr(os, name, 0)  # Windows has only some of them
    problem: Exception = IrregularFile(path)
    if is_written:
        problem = UserError(problem.what, fix=problem.fix)
    try:
        handle = os.open(path, all_flags, 0o666)
    except OSError as error:
        raise (problem if error.errno == errno.ENXIO else error) from None  # no process has opened the pipe
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        os.close(handle)
        raise problem
    if is_written and found.st_nlink > 1:  # the other name may belong to a backup, or to any file of the user
        os.close(handle)
        write_atomic(Path(path), Path(path).read_bytes())
        return open_handle(path, flags)
    if flags & os.O_TRUNC:
        os.ftruncate(handle, 0)
    return handle


def open_file(path: str | Path, mode: str = "rb", **options: Any) -> Any:
    """Open a file as `open` does, with the checks of `open_handle`."""
    return open(path, mode, opener=open_handle, **options)


def read_bytes(path: Path) -> bytes:
    """Return the content of a regular file."""
    with open_file(path) as file:
        return file.read()


def read_text(path: Path, *, encoding: str = "utf-8", errors: str = "strict") -> str:
    """Return the text of a regular file."""
    with open_file(path, "r", encoding=encoding, errors=errors) as file:
        return file.read()


def read_data(module: str, name: str) -> Any:
    """Return the content of a TOML, JSON or JSONL file of this package. It lies beside the `module`, a `__file__`."""
    text = Path(module).with_name(name).read_text(encoding="utf-8")
    if name.endswith(".jsonl"):
        return [json.loads(line) for line in text.splitlines()]
    return tomllib.loads(text) if name.endswith(".toml") else json.loads(text)


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with open_file(path) as file:
        return sha256_stream(file)


def sha256_stream(stream: BinaryIO) -> str:
    """Return the SHA-256 of the rest of an open file."""
    digest = hashlib.sha256()
    while block := stream.read(_HASH_BLOCK_BYTES):
        digest.update(block)
    return digest.hexdigest()


def sha256_text(*parts: str) -> str:
    """Return the SHA-256 of several texts. Moving a character from one text to the next changes the hash."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def parse_json(data: str | bytes) -> Any:
    """Return a JSON value. Raise ValueError if it is invalid or nested too deeply (`json` raises RecursionError)."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def stable_json(value: Any) -> str:
    """Return JSON that is byte-identical for equal values: sorted keys, indent of two spaces, final newline."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, indent=2) + "\n"


def make_private(folder: Path) -> None:
    """Create a folder for rows or answers that only its owner can open. An existing folder keeps its mode.

    In a folder that a group shares (setgid), the group can open it too, as the umask says. Windows ignores the mode;
    there, a new folder has the permissions of its parent.
    """
    existing = next((parent for parent in folder.parents if parent.is_dir()), None)
    is_shared = existing is not None and existing.stat().st_mode & stat.S_ISGID
    try:
        folder.mkdir(mode=0o770 if is_shared else 0o700, parents=True)  # its parents get the usual mode
    except FileExistsError:
        if not folder.is_dir():
            raise


def sync_folder(folder: Path) -> None:
    """Flush the directory entries of a folder to disk (fsync). Does nothing on Windows, which cannot sync folders."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Flush every file below a folder to disk, including files that other libraries wrote."""
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            sync_folder(path)
        else:
            with path.open("rb+") as file:
                os.fsync(file.fileno())
    sync_folder(folder)


def write_synced(path: Path, *parts: bytes | memoryview) -> None:
    """Write and flush a new file in a staging folder. A failure leaves a partial file."""
    handle = open_handle(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        for part in parts:
            write_all(handle, part)
        os.fsync(handle)
    finally:
        os.close(handle)


def write_all(handle: int, data: bytes | memoryview) -> None:
    """Write all bytes to an open file, with several system calls if necessary."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(handle, rest[:_WRITE_BLOCK_BYTES]) :]


def write_atomic(path: Path, data: bytes | str, *, is_private: bool = False) -> None:
    """Replace a file atomically: a reader sees the old or the new content, never a partial file.

    With `is_private`, only the owner can read the file, where the system supports it.
    """
    staged = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        staged.unlink(missing_ok=True)
        staged.touch(mode=0o600 if is_private else 0o666, exist_ok=False)
        with open_file(staged, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)
    sync_folder(path.parent)


def publish_folder(staged: Path, final: Path) -> None:
    """Move a finished folder to its final path. An existing folder is moved aside first and deleted afterwards.

    The new folder has the mode of the existing one, so that a team can go on sharing it.
    If anything fails, the existing folder is restored. After a crash between the two moves, `final` does not exist and
    readers report it as missing; `recover_publish` restores the old folder.
    """
    recover_publish(final)
    sync_folder(staged)
    if final.exists():
        with suppress(OSError):  # some network disks have no modes
            staged.chmod(stat.S_IMODE(final.stat().st_mode))
        final.rename(_aside(final))
    try:
        staged.rename(final)
    except BaseException:
        recover_publish(final)
        raise
    sync_folder(final.parent)
    recover_publish(final)


def recover_publish(final: Path) -> None:
    """Clean up after an interrupted publish: restore the old folder, or delete it if the new one is in place."""
    aside, trash = _aside(final), _trash(final)
    if aside.exists() and not final.exists():
        aside.rename(final)
    # A folder is renamed before it is deleted, so that a partly deleted folder is never restored.
    if trash.exists():
        shutil.rmtree(trash)
    if aside.exists():
        aside.rename(trash)
        shutil.rmtree(trash)


def has_unfinished_publish(final: Path) -> bool:
    """Return True if `recover_publish` has something to clean up."""
    return _aside(final).exists() or _trash(final).exists()


def _aside(final: Path) -> Path:
    return final.with_name(f".{final.name}.old")


def _trash(final: Path) -> Path:
    return final.with_name(f".{final.name}.trash")


def is_disk_full(error: OSError) -> bool:
    """Return True if the disk or the user's quota is full."""
    return error.errno in _DISK_FULL


def require_disk_space(folder: Path, needed_bytes: int) -> None:
    """Raise UserError if fewer than `needed_bytes` are free on the disk of `folder`."""
    if shutil.disk_usage(folder).free < needed_bytes:
        raise _disk_full(folder, needed_bytes)


@contextmanager
def disk_full_as_user_error(folder: Path, needed_bytes: Callable[[], int]) -> Generator[None, None, None]:
    """Raise UserError if the disk fills up in the `with` block; `needed_bytes` returns what a retry would write."""
    try:
        yield
    except OSError as error:
        if not is_disk_full(error):
            raise
        raise _disk_full(folder, needed_bytes()) from error


def _disk_full(folder: Path, needed_bytes: int) -> UserError:
    free_bytes = shutil.disk_usage(folder).free
    missing_bytes = max(needed_bytes - free_bytes, 1 << 20)  # writes can fail while a little space is free
    return UserError(
        f"not enough disk space: about {size_bytes(missing_bytes)} short",
        where=f"`{folder}` needs {size_bytes(needed_bytes)}, {size_bytes(free_bytes)} are free",
        fix=f"free {size_bytes(missing_bytes)} and run the command again (it continues), or change `--out`",
    )


def explain_os_error(error: OSError) -> UserError | None:
    """Return a UserError for a problem of a path or a disk, or None for an error that may be a bug."""
    known = read_data(__file__, "path_problems.toml").get(errno.errorcode.get(error.errno or 0))
    if known is None or error.filename is None:
        return None
    name = str(cast(object, error.filename))
    shown = name if len(name) <= _SHOWN_CHARS else f"{name[:_SHOWN_CHARS]}... ({len(name):,} characters)"
    return UserError(known[0], where=shown, fix=known[1])


def require_output_path(path: Path) -> None:
    """Raise UserError if a path cannot be an output folder: the root of a disk, or a name that no disk accepts."""
    if "\0" in str(path):
        raise UserError("the name of an output folder contains a NUL character", fix="choose a folder with `--out`")
    if not path.resolve().name:
        raise UserError(f"`{path}` is the root of a disk, not an output folder", fix="choose a folder with `--out`")
    try:
        path.with_name(f"{path.name}{'x' * _ADDED_CHARS}").exists()
    except OSError as error:
        raise explain_os_error(error) or error from error


def link_or_copy(source: Path, target: Path) -> None:
    """Create a hard link, or a copy if the file system does not support hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


# A lock file that prevents two processes from working in the same folder.
# Errors from file systems without locks (some network file systems).
_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP})


@dataclass(frozen=True)
class Owner:
    """The process that holds a lock."""

    pid: int
    host: str
    since: str

    def __str__(self) -> str:
        host = "" if self.host == socket.gethostname() else f" on {self.host}"
        return f"process {self.pid}{host}, since {self.since}"


class FolderLock:
    """A lock that is held until `release`, the end of a `with` block, or the end of the process.

    The lock file contains the owner: process, host and start time. It is emptied on release and never deleted.
    """

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    @classmethod
    def take(cls, path: Path, *, doing: str) -> "FolderLock":
        """Acquire the lock; raise UserError with the owner if a running process holds it."""
        file = open_file(path, "a+", encoding="utf-8", errors="replace")
        try:
            is_locked = _is_locked_by_other(file)
            file.seek(0)
            text = file.read()
            # The owner may have died while it was written.
            if not _LOCK_START.startswith(text.strip("\0")[: len(_LOCK_START)]):
                raise UserError(
                    f"`{path}` is not a lock file", fix=f"move `{path}` away: tunewell writes its lock there"
                )
            owner = _read_owner(text)
            if is_locked or (is_locked is None and owner is not None and _may_be_running(owner)):
                raise UserError(
                    f"another process is {doing}",
                    where=str(owner or "unknown process"),
                    fix="wait until that process ends, or stop it"
                    + (f"; if it is no longer running, delete `{path}`" if is_locked is None else ""),
                )
            file.truncate(0)
            since = datetime.now().astimezone().isoformat(" ", "seconds")
            file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}) + "\n")
            file.flush()
        except BaseException:
            file.close()
            raise
        return cls(file)

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if not self._file.closed:
            with suppress(OSError):  # on a full disk, closing the file still releases the lock
                self._file.truncate(0)  # without file locks, the owner in the file is the lock
            self._file.close()

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def running_owner(path: Path) -> tuple[Owner | None, bool]:
    """Return the owner named in a lock file, and whether it may still be running. The lock is not touched.

    None means that the lock was released. An owner that has ended was killed: it had no time to release its lock.
    """
    try:
        owner = _read_owner(read_text(path, errors="replace"))
    except OSError:
        return None, False
    return owner, owner is not None and _may_be_running(owner)


def is_locked(path: Path) -> bool:
    """Return True unless the lock is certainly free: its process may have ended, and another may have its number."""
    try:
        with open_file(path, "a+", encoding="utf-8", errors="replace") as file:
            return _is_locked_by_other(file) is not False
    except OSError:
        return True


def _is_locked_by_other(file: IO[str]) -> bool | None:
    """Try to lock an open file. Return False if this process now holds the lock, None if locks are not supported."""
    from filelock import lock_descriptor  # 10 ms that most commands do not need

    try:
        return not lock_descriptor(file.fileno(), blocking=False)
    except OSError as error:
        return None if error.errno in _NO_LOCKS else True


def _read_owner(text: str) -> Owner | None:
    try:
        return Owner(**json.loads(text))
    except (ValueError, TypeError):
        return None  # released, or the owner died while writing


def _may_be_running(owner: Owner) -> bool:
    """Return False only if the owner has certainly ended; processes on another host cannot be checked."""
    if owner.host != socket.gethostname():
        return True
    if os.name == "nt":
        return False  # on Windows, signal 0 would end the process
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # the process belongs to another user
    return True
