"""The cache of one user on disk: entries by the hash of what they depend on, the oldest of which are deleted.

~/.cache/tunewell/   or `TUNEWELL_CACHE`, or below `XDG_CACHE_HOME`
  base/91c0....npz   probes/5e1d....json   hashes/...   a folder for each purpose, a file for each entry
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunewell.core.files import (
    make_private,
    parse_json,
    read_bytes,
    sha256_file,
    sha256_text,
    stable_json,
    write_atomic,
)

_STAMP_SECONDS = 2.0
"""A file that changed more recently may change again without a new stamp."""
_LARGE_BYTES = 64 << 20
"""Hashing a smaller file takes less than 0.1 s."""


def cache_folder(name: str) -> Path | None:
    """Return a folder of this user's cache, or None if it cannot be written."""
    root = os.environ.get("TUNEWELL_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "tunewell"
    folder = Path(root).expanduser() / name
    try:
        make_private(folder.parent)
        folder.mkdir(exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return folder if os.access(folder, os.W_OK) else None


@dataclass(frozen=True)
class DiskCache:
    """Entries for one purpose. Nothing is read or stored if the folder cannot be written or the disk is full.

    A key is the name of its entry, or a JSON value of which the name is a hash. Everything that changes the content of
    an entry must be in its key.
    """

    name: str
    suffix: str = ".json"
    max_entries: int = 1000

    def path(self, key: Any) -> Path | None:
        """Return the file of a key, or None without a cache."""
        folder = cache_folder(self.name)
        name = key if isinstance(key, str) else sha256_text(stable_json(key))[:32]
        return folder / f"{name}{self.suffix}" if folder else None

    def read(self, key: Any) -> Any:
        """Return the JSON value of an entry; None if there is none, or if it is damaged."""
        with suppress(OSError, ValueError):
            if (path := self.path(key)) is not None:
                return parse_json(read_bytes(path))
        return None

    def write(self, key: Any, value: Any) -> None:
        """Store bytes, or a JSON value. The oldest entries are deleted if there are too many."""
        with suppress(OSError):
            if (path := self.path(key)) is not None:
                write_atomic(path, value if isinstance(value, bytes) else stable_json(value))
                entries = sorted(path.parent.glob(f"*{self.suffix}"), key=lambda entry: entry.stat().st_mtime)
                for entry in entries[: -self.max_entries]:
                    entry.unlink(missing_ok=True)


_by_stamp: dict[str, tuple[Any, Any]] = {}


def cached_by_stamp(name: str | None, paths: Sequence[Path], compute: Callable[[], Any]) -> Any:
    """Return a JSON value computed from files. It is computed again only if a file's stamp has changed.

    With the `name` of a cache, it is also cached for other processes of this user.
    """
    stats = [path.stat() for path in paths]
    stamp = [[one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns] for one in stats]
    key = sha256_text(str(name), *(str(path.resolve()) for path in paths))[:32]
    cache = DiskCache(name) if name else None
    if key not in _by_stamp and cache:
        with suppress(LookupError, TypeError):
            known = cache.read(key)
            _by_stamp[key] = known["stamp"], known["value"]
    if key not in _by_stamp or _by_stamp[key][0] != stamp:
        _by_stamp[key] = stamp, compute()
        # A file that was written just now can change again within the resolution of its time.
        if cache and all(time.time() - one.st_ctime > _STAMP_SECONDS for one in stats):
            cache.write(key, {"stamp": stamp, "value": _by_stamp[key][1]})
    return _by_stamp[key][1]


def sha256_once(path: Path) -> str:
    """Return the SHA-256 of a file. It is computed again only if the file's stamp has changed."""
    name = "hashes" if path.stat().st_size >= _LARGE_BYTES else None
    return cached_by_stamp(name, [path], lambda: sha256_file(path))
