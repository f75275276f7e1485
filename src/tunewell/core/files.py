"""Write files whole or not at all, know them by their hash, and say plainly when the disk is full."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from tunewell.core.errors import UserError
from tunewell.core.units import size_bytes

_HASH_BLOCK_BYTES = 1 << 20
_WRITE_BLOCK_BYTES = 16 << 20
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_CANNOT_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP})


def is_url(path: str) -> bool:
    """Return True for `scheme://...`, which must never be joined, normalised or made relative like a path."""
    return "://" in path


def sha256_file(path: Path) -> str:
    """Hash a file's bytes."""
    with path.open("rb") as file:
        return sha256_stream(file)


def sha256_stream(stream: BinaryIO) -> str:
    """Hash the rest of an open file."""
    digest = hashlib.sha256()
    while block := stream.read(_HASH_BLOCK_BYTES):
        digest.update(block)
    return digest.hexdigest()


def sha256_text(*parts: str) -> str:
    """Hash several texts so that moving a character from one to the next changes the hash."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def stable_json(value: Any) -> str:
    """Write JSON with equal bytes for equal values."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, indent=2) + "\n"


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut; a no-op where folders cannot be flushed (Windows)."""
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
    """Make everything below a folder survive a power cut, whoever wrote it (Arrow, SQLite)."""
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            sync_folder(path)
        else:
            with path.open("rb+") as file:
                os.fsync(file.fileno())
    sync_folder(folder)


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and flush it to the disk, through `os.write` and `os.fsync` alone; a part is left if one fails.

    For files in a folder that is published as a whole. Every byte of a checkpoint passes here.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0), 0o666)
    try:
        write_all(handle, data)
        os.fsync(handle)
    finally:
        os.close(handle)


def write_all(handle: int, data: bytes) -> None:
    """Write all bytes to an open file, in as many calls as it takes: one where the system takes them at once."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(handle, rest[:_WRITE_BLOCK_BYTES]) :]


def is_full(error: OSError) -> bool:
    """Tell whether an error means that the disk, or this user's share of it, is full."""
    return error.errno in _FULL


def write_atomic(path: Path, data: bytes | str) -> None:
    """Replace a file in one move: a reader sees the old bytes or the new ones, never a part."""
    staged = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with staged.open("wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)
    sync_folder(path.parent)


def publish_folder(staged: Path, final: Path) -> None:
    """Put a finished folder in its place; an old one is moved aside first, and deleted when the new one is there.

    When anything fails the old one is back in its place. A crash between the two moves leaves no `final`, which readers
    report as missing; `undo_publish` brings the old one back.
    """
    undo_publish(final)
    sync_folder(staged)
    if final.exists():
        final.rename(_aside(final))
    try:
        staged.rename(final)
    except BaseException:
        undo_publish(final)
        raise
    sync_folder(final.parent)
    undo_publish(final)


def undo_publish(final: Path) -> None:
    """Clean up after a publish that was cut short: the old folder goes back if nothing took its place, else away."""
    aside, trash = _aside(final), final.with_name(f".{final.name}.trash")
    if aside.exists() and not final.exists():
        aside.rename(final)
    # What is being deleted has a name of its own: a half-deleted folder is never taken for one to bring back.
    if trash.exists():
        shutil.rmtree(trash)
    if aside.exists():
        aside.rename(trash)
        shutil.rmtree(trash)


def publish_was_cut_short(final: Path) -> bool:
    """Tell whether `undo_publish` has something to do."""
    return _aside(final).exists() or final.with_name(f".{final.name}.trash").exists()


def _aside(final: Path) -> Path:
    return final.with_name(f".{final.name}.old")


def refuse_full_disk(folder: Path, needed: int) -> None:
    """Raise UserError if less than `needed` bytes are free where `folder` lies."""
    if shutil.disk_usage(folder).free < needed:
        raise _no_room(folder, needed)


@contextmanager
def told_when_full(folder: Path, needed: Callable[[], int]) -> Iterator[None]:
    """Turn a disk that fills up in the body into a UserError; `needed` says how many bytes another try would write."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        raise _no_room(folder, needed()) from error


def _no_room(folder: Path, needed: int) -> UserError:
    free = shutil.disk_usage(folder).free
    missing = max(needed - free, 1 << 20)  # a disk may refuse to write while a little is free
    return UserError(
        f"the disk is full: about {size_bytes(missing)} are missing",
        where=f"{size_bytes(needed)} have to be written to `{folder}`, {size_bytes(free)} are free",
        fix=f"free {size_bytes(missing)} and run it again: it goes on where it stopped; or name another `--out`",
    )
