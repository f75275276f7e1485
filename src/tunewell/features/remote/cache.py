"""The cache of downloaded files: content is stored once, by its SHA-256, up to a size limit.

objects/
  content/3f/3f2a...      the bytes of a file, read-only, named by their SHA-256
  files/91c0....json      an address: stamp of the server, size and SHA-256
  listings/77ab....json   what an address, folder or pattern matched, for `--offline`
  partial/91c0...-5e1d    an unfinished download; its name contains the stamp, so versions are never mixed
"""

import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from tunewell.config.schema import Storage
from tunewell.core.cache import cache_folder
from tunewell.core.errors import UserError
from tunewell.core.files import read_text, sha256_text, stable_json, write_atomic
from tunewell.core.units import size_bytes
from tunewell.features.remote.address import Address
from tunewell.features.remote.store import RemoteObject

_RESERVE_BYTES = 64 << 20
"""Bytes that stay free on the disk of the cache."""
_TIME_NS = 1_000_000_000 * 10**9
"""Modification time of all content in the cache. Content with another time was changed, and is not used."""
_MAX_PARTIAL_SECONDS = 7 * 24 * 3600.0


def cache_key(address: Address) -> str:
    """Return the name of an address in the cache. The endpoint is not part of it: other content has another stamp."""
    return sha256_text(str(address))[:40]


class ObjectCache:
    """The cache of one user, shared by all projects and processes."""

    _used: ClassVar[set[Path]] = set()
    """Content that this process needs. It is never removed."""

    def __init__(self, settings: Storage) -> None:
        folder = cache_folder("objects")
        if folder is None:
            raise UserError(
                "the cache folder for remote files cannot be written",
                fix="set the variable TUNEWELL_CACHE to a folder that you may write to",
            )
        self.folder = folder
        self.max_bytes = int(settings.cache_gb * 1e9)
        for name in ("content", "files", "listings", "partial"):
            (folder / name).mkdir(exist_ok=True)

    def find(self, key: str, entry: RemoteObject) -> tuple[Path, str] | None:
        """Return the path and the SHA-256 of a file with this stamp, or None if it is not cached or damaged."""
        try:
            record = json.loads(read_text(self.folder / "files" / f"{key}.json"))
            path = self._content(record["sha256"])
            stat = path.stat()
            is_same = record["stamp"] == entry.stamp and stat.st_size == record["bytes"] == entry.size
            if not is_same or stat.st_mtime_ns != _TIME_NS:
                return None
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if path not in self._used:
            with suppress(OSError):  # another process removed it, or another user owns it
                os.utime(self.folder / "files" / f"{key}.json")  # the time of the last use
            self._used.add(path)
        return path, record["sha256"]

    def partial_path(self, key: str, entry: RemoteObject) -> Path:
        """Return the path of the unfinished download of this version of a file."""
        return self.folder / "partial" / f"{key}-{sha256_text(entry.stamp)[:16]}"

    def add(self, partial: Path, key: str, entry: RemoteObject, sha256: str) -> Path:
        """Move a finished download to its place, and record the address. Equal content is stored once."""
        path = self._content(sha256)
        path.parent.mkdir(exist_ok=True)
        self._used.add(path)
        os.utime(partial, ns=(_TIME_NS, _TIME_NS))
        partial.replace(path)
        path.chmod(0o444)  # last: a process that is killed before leaves a partial file that the next one can continue
        record = {"address": entry.name, "stamp": entry.stamp, "bytes": entry.size, "sha256": sha256}
        write_atomic(self.folder / "files" / f"{key}.json", stable_json(record))
        return path

    def save_listing(self, key: str, found: Sequence[RemoteObject]) -> None:
        """Store what an address matched, for `--offline`."""
        entries = [[entry.address.key, entry.size, entry.stamp, entry.host] for entry in found]
        write_atomic(self.folder / "listings" / f"{key}.json", json.dumps(entries))

    def load_listing(self, key: str, address: Address) -> list[RemoteObject] | None:
        """Return what an address matched when it was last listed, or None."""
        try:
            entries = json.loads(read_text(self.folder / "listings" / f"{key}.json"))
            return [
                RemoteObject(address.with_key(name), size, stamp, host="".join(host))
                for name, size, stamp, *host in entries
            ]
        except (OSError, ValueError, TypeError):
            return None

    def make_room(self, needed_bytes: int, *, wanted_bytes: int) -> None:
        """Remove the files that were not used for the longest time; raise UserError if the limit is too small.

        `wanted_bytes` is the size of all files of this command, `needed_bytes` of those that are not cached yet.
        """
        if wanted_bytes > self.max_bytes:
            raise UserError(
                f"the remote files ({size_bytes(wanted_bytes)}) do not fit in the cache "
                f"(limit: {size_bytes(self.max_bytes)})",
                where=f"`{self.folder}`",
                fix=f"raise `storage.cache_gb` to at least {wanted_bytes / 1e9:.1f}",
            )
        self._remove_old_partials()
        sizes = {path: stat.st_size for path, stat in _stats((self.folder / "content").glob("*/*"))}
        excess = sum(sizes.values()) + needed_bytes - self.max_bytes
        for path in self._least_used(sizes):
            if excess <= 0:
                break
            excess -= sizes[path]
            path.unlink(missing_ok=True)
        free_bytes = shutil.disk_usage(self.folder).free - _RESERVE_BYTES
        if needed_bytes > free_bytes:
            raise UserError(
                f"not enough disk space for the remote files: {size_bytes(needed_bytes - free_bytes)} short",
                where=f"the cache `{self.folder}`",
                fix="free some space, or set the variable TUNEWELL_CACHE to a folder on another disk",
            )

    def _least_used(self, sizes: Iterable[Path]) -> list[Path]:
        """Return the content that this process does not need, the least recently used first; drop stale records."""
        used: dict[Path, float] = dict.fromkeys(sizes, 0.0)
        for record in (self.folder / "files").glob("*.json"):
            try:
                path = self._content(json.loads(read_text(record))["sha256"])
                if path in used:
                    used[path] = max(used[path], record.stat().st_mtime)
                elif not path.exists():  # else another process has added it since
                    record.unlink(missing_ok=True)
            except (OSError, ValueError, KeyError, TypeError):
                record.unlink(missing_ok=True)
        return sorted((path for path in used if path not in self._used), key=lambda path: used[path])

    def _remove_old_partials(self) -> None:
        for path, stat in _stats((self.folder / "partial").iterdir()):
            if time.time() - stat.st_ctime > _MAX_PARTIAL_SECONDS:  # `add` sets the other time
                path.unlink(missing_ok=True)

    def _content(self, sha256: str) -> Path:
        return self.folder / "content" / sha256[:2] / sha256


def _stats(paths: Iterable[Path]) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield paths with their sizes and times, without those that another process has just moved or removed."""
    for path in paths:
        with suppress(FileNotFoundError):
            yield path, path.stat()
