"""Write files whole or not at all, and know them by their hash."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_HASH_BLOCK_BYTES = 1 << 20


def sha256_file(path: Path) -> str:
    """Hash a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_HASH_BLOCK_BYTES):
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
    """Make the names in a folder survive a power cut; a no-op where folders cannot be opened (Windows)."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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


def sync_files(paths: Iterable[Path]) -> None:
    """Flush files that were written by others (Arrow, SQLite) to the disk."""
    for path in paths:
        with path.open("rb+") as file:
            os.fsync(file.fileno())


def publish_folder(staged: Path, final: Path) -> None:
    """Put a finished folder in its place; an old one there is moved aside first, then deleted.

    A crash between the two moves leaves no `final`, which readers report as missing, never as whole.
    """
    sync_folder(staged)
    old = final.with_name(f".{final.name}.old")
    if old.exists():
        shutil.rmtree(old)
    if final.exists():
        final.rename(old)
    staged.rename(final)
    sync_folder(final.parent)
    if old.exists():
        shutil.rmtree(old)
