"""Download remote files into the cache: several at once, resumed after a lost connection or a killed process."""

import hashlib
import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.files import FolderLock, is_disk_full
from tunewell.core.progress import Progress, ProgressListener, silent
from tunewell.core.units import size_bytes
from tunewell.storage.cache import ObjectCache, cache_key
from tunewell.storage.problems import is_temporary
from tunewell.storage.store import RemoteObject, RemoteStore

_NUM_STREAMS = 8
"""Number of parallel downloads. One stream from S3 transfers less than 100 MB/s."""
_WAITS = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0)
"""Seconds between attempts without a new byte. Every byte received starts the list again."""
_REPORT_SECONDS = 0.2
_READ_BYTES = 1 << 20
STAGE = "downloading"


class _Stopped(Exception):
    """Raised in the other downloads after one has failed."""


@dataclass
class _Download:
    """The shared state of parallel downloads."""

    store: RemoteStore
    cache: ObjectCache
    stop: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    num_bytes: int = 0

    def count(self, num_bytes: int) -> None:
        if self.stop.is_set():
            raise _Stopped
        with self.lock:
            self.num_bytes += num_bytes


def fetch(
    store: RemoteStore, found: Sequence[RemoteObject], cache: ObjectCache, progress: ProgressListener = silent
) -> list[tuple[Path, str]]:
    """Return the cached path and the SHA-256 of every file. Files that are not cached are downloaded."""
    keys = [cache_key(entry.address) for entry in found]
    missing = {key: entry for key, entry in zip(keys, found, strict=True) if cache.find(key, entry) is None}
    if missing:
        _download_all(_Download(store, cache), missing, found, progress)
    cached = [cache.find(key, entry) for key, entry in zip(keys, found, strict=True)]
    return [_require(place, entry) for place, entry in zip(cached, found, strict=True)]


def _require(place: tuple[Path, str] | None, entry: RemoteObject) -> tuple[Path, str]:
    if place is None:
        raise UserError(f"`{entry.name}` was removed from the cache", fix="run the command again")
    return place


def _download_all(
    shared: _Download, missing: dict[str, RemoteObject], found: Iterable[RemoteObject], progress: ProgressListener
) -> None:
    total = sum(entry.size for entry in missing.values())
    shared.cache.make_room(total, wanted_bytes=sum(entry.size for entry in found))
    progress(Progress(STAGE, 0, total, "bytes"))
    pool = ThreadPoolExecutor(_NUM_STREAMS, thread_name_prefix="tunewell-download")
    # Large files first, so that the last stream does not end alone.
    order = sorted(missing, key=lambda key: -missing[key].size)
    waiting: set[Future[None]] = {pool.submit(_download_one, key, missing[key], shared) for key in order}
    try:
        while waiting:
            done, waiting = wait(waiting, timeout=_REPORT_SECONDS, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            progress(Progress(STAGE, shared.num_bytes, total, "bytes"))
    finally:
        shared.stop.set()
        pool.shutdown(cancel_futures=True)


def _download_one(key: str, entry: RemoteObject, shared: _Download) -> None:
    partial = shared.cache.partial_path(key, entry)
    lock = partial.with_name(f"{partial.name}.lock")
    try:
        with _locked(lock, shared.stop):
            if shared.cache.find(key, entry) is not None:  # another process has just downloaded it
                shared.count(entry.size)
                return
            sha256 = _checked_download(partial, entry, shared)
            shared.cache.add(partial, key, entry, sha256)
            lock.unlink(missing_ok=True)
    except OSError as error:
        if not is_disk_full(error):
            raise
        raise UserError(
            f"the disk is full: `{entry.name}` ({size_bytes(entry.size)}) was not downloaded",
            where=f"the cache `{shared.cache.folder}`",
            fix="free some space, or set the variable TUNEWELL_CACHE to a folder on another disk",
        ) from None


def _locked(lock: Path, stop: threading.Event) -> FolderLock:
    """Wait for the lock of a download. Another process that holds it downloads the same file."""
    while True:
        try:
            return FolderLock.take(lock, doing="downloading the same file")
        except UserError:
            if stop.wait(_REPORT_SECONDS):
                raise _Stopped from None


def _checked_download(partial: Path, entry: RemoteObject, shared: _Download) -> str:
    """Download a file, and compare it with the ETag if that is an MD5; return its SHA-256."""
    sha256, md5 = _download(partial, entry, shared)
    expected = (entry.etag or "").strip('"')
    if entry.address.is_web or len(expected) != hashlib.md5().digest_size * 2 or md5 == expected:
        return sha256
    # The ETag of an encrypted object is not a hash of its content. Then a second download gives the same bytes.
    partial.unlink()
    again, md5 = _download(partial, entry, shared)
    if again != sha256 and md5 != expected:  # else the first one continued a damaged partial file
        partial.unlink()
        raise UserError(
            f"two downloads of `{entry.name}` differ, and neither matches the checksum of the server",
            fix="check the network and its proxies, and run the command again",
        )
    return again


def _download(partial: Path, entry: RemoteObject, shared: _Download) -> tuple[str, str]:
    """Append the missing bytes of a file to `partial`; return the SHA-256 and the MD5 of the whole file."""
    sha256, md5 = hashlib.sha256(), hashlib.md5(usedforsecurity=False)
    with partial.open("a+b") as file:
        size = _hash_start(file, entry.size, shared, sha256, md5)
        attempt = 0
        while size < entry.size:
            before = size
            try:
                for chunk in shared.store.read(entry, start=size):
                    file.write(chunk)
                    sha256.update(chunk)
                    md5.update(chunk)
                    size += len(chunk)
                    shared.count(len(chunk))
                problem: Exception = UserError(
                    f"the download of `{entry.name}` ended after {size:,} of {entry.size:,} bytes",
                    fix="run the command again; it continues where it stopped",
                )
            except (_Stopped, UserError, OSError):
                file.flush()
                raise
            except Exception as error:  # noqa: BLE001  the storage library raises one class for most errors
                if not is_temporary(error):
                    raise shared.store.explain(error, entry.address) from None
                problem = shared.store.explain(error, entry.address)
            if size < entry.size:
                attempt = 0 if size > before else attempt + 1
                if attempt >= len(_WAITS):
                    raise problem from None
                if shared.stop.wait(_WAITS[attempt]):
                    raise _Stopped
        file.flush()
        os.fsync(file.fileno())
    if size != entry.size:
        partial.unlink()
        raise UserError(
            f"`{entry.name}` has {size:,} bytes; the server listed {entry.size:,}", fix="run the command again"
        )
    return sha256.hexdigest(), md5.hexdigest()


def _hash_start(file: Any, limit: int, shared: _Download, *digests: Any) -> int:
    """Hash the bytes of an earlier attempt and return their number. If there are too many, delete them."""
    size = file.seek(0, os.SEEK_END)
    if size > limit:
        file.truncate(0)
        return 0
    file.seek(0)
    while block := file.read(_READ_BYTES):
        for digest in digests:
            digest.update(block)
    shared.count(size)
    return size
