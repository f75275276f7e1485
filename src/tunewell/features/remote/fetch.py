"""Download remote files into the cache: several at once, resumed after a lost connection or a killed process.

Files are downloaded in their order. Each can be read as soon as it is complete and checked:

    download   1 2 3 4 5 6 7 8 9 10 ...
    read               1 2 3 4 5 6  ...
"""

import hashlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.files import FolderLock, is_disk_full, open_file
from tunewell.core.progress import DOWNLOADING, Progress, ProgressListener, silent
from tunewell.core.units import size_bytes
from tunewell.features.remote.cache import ObjectCache, cache_key
from tunewell.features.remote.problems import is_temporary
from tunewell.features.remote.store import RemoteObject, RemoteStore

_NUM_STREAMS = 8
"""Number of parallel downloads. One stream from S3 transfers less than 100 MB/s."""
_WAITS = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0)
"""Seconds between attempts without a new byte. Every byte received starts the list again."""
_REPORT_SECONDS = 2.0
"""A reader that waits less long for a file reports its own progress only."""
_POLL_SECONDS = 0.2
_READ_BYTES = 1 << 20


class _Stopped(Exception):
    """Raised in the other downloads after one has failed, or when the command ends."""


@dataclass
class _Download:
    """The shared state of parallel downloads."""

    store: RemoteStore
    cache: ObjectCache
    waiting: deque[tuple[str, RemoteObject]]
    total_bytes: int
    num_bytes: int = 0
    finished: set[str] = field(default_factory=set[str])
    error: BaseException | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    changed: threading.Condition = field(default_factory=threading.Condition)
    threads: list[threading.Thread] = field(default_factory=list[threading.Thread])

    def start(self) -> None:
        for _ in range(min(_NUM_STREAMS, len(self.waiting))):
            self.threads.append(threading.Thread(target=self._run, name="tunewell-download"))
            self.threads[-1].start()

    def end(self) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()

    def count(self, num_bytes: int) -> None:
        # Python waits for these threads at the end of a command, also after an error in the reader.
        if self.stop.is_set() or not threading.main_thread().is_alive():
            raise _Stopped
        with self.changed:
            self.num_bytes += num_bytes

    def sleep(self, seconds: float) -> None:
        """Wait before another attempt; raise _Stopped if the downloads are stopped."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.count(0)
            self.stop.wait(min(left, _POLL_SECONDS))
        self.count(0)

    def wait(self, key: str, seconds: float) -> bool:
        """Return True as soon as a file is downloaded or any download has failed; False after `seconds`."""
        with self.changed:
            return self.changed.wait_for(lambda: key in self.finished or self.error is not None, seconds)

    def _run(self) -> None:
        """Download files until none is left or one has failed."""
        with suppress(_Stopped, IndexError):  # stopped, or no file is left
            while not self.stop.is_set():
                key, entry = self.waiting.popleft()
                try:
                    _download_one(key, entry, self)
                except _Stopped:
                    raise
                except BaseException as error:  # noqa: BLE001  a panic too; raised again where the files are read
                    self.error = self.error or error
                    self.stop.set()
                with self.changed:
                    self.finished.add(key)
                    self.changed.notify_all()


class Downloads:
    """Files that are downloaded in their order, several at once, while the first ones are read.

    The first `fetch` starts the downloads. They end when all files are in the cache, when one has failed, or when
    nothing refers to this object any more.
    """

    def __init__(
        self, store: RemoteStore, found: Sequence[RemoteObject], cache: ObjectCache, progress: ProgressListener = silent
    ) -> None:
        self._store, self._cache, self._progress = store, cache, progress
        self._found = {cache_key(entry.address): entry for entry in found}
        self._current: _Download | None = None
        self._num_reported = 0

    def fetch(self, entry: RemoteObject) -> tuple[Path, str]:
        """Return the cached path and the SHA-256 of a file as soon as it is downloaded."""
        key = cache_key(entry.address)
        place = self._cache.find(key, entry)
        current = self._current
        if current is None or (place is None and key in current.finished):
            current = self._start()
        try:
            if place is None:
                while not current.wait(key, _REPORT_SECONDS):
                    self._report(current)
                place = self._cache.find(key, entry)
            if current.error is not None:
                raise current.error
        except BaseException:
            self._current = None
            current.end()
            raise
        if current.num_bytes >= current.total_bytes > self._num_reported:
            self._report(current)
        if place is None:
            raise UserError(f"`{entry.name}` was removed from the cache", fix="run the command again")
        return place

    def _start(self) -> _Download:
        missing = {key: entry for key, entry in self._found.items() if self._cache.find(key, entry) is None}
        total = sum(entry.size for entry in missing.values())
        current = _Download(self._store, self._cache, deque(missing.items()), total)
        if missing:
            self._cache.make_room(total, wanted_bytes=sum(entry.size for entry in self._found.values()))
            self._report(current)
        current.start()
        weakref.finalize(self, current.stop.set)
        self._current = current
        return current

    def _report(self, current: _Download) -> None:
        self._num_reported = current.num_bytes
        self._progress(Progress(DOWNLOADING, current.num_bytes, current.total_bytes, "bytes"))


def fetch(
    store: RemoteStore, found: Sequence[RemoteObject], cache: ObjectCache, progress: ProgressListener = silent
) -> list[tuple[Path, str]]:
    """Return the cached path and the SHA-256 of every file. Files that are not cached are downloaded."""
    downloads = Downloads(store, found, cache, progress)
    return [downloads.fetch(entry) for entry in found]


def _download_one(key: str, entry: RemoteObject, shared: _Download) -> None:
    partial = shared.cache.partial_path(key, entry)
    lock = partial.with_name(f"{partial.name}.lock")
    try:
        with _locked(lock, shared):
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


def _locked(lock: Path, shared: _Download) -> FolderLock:
    """Wait for the lock of a download. Another process that holds it downloads the same file."""
    while True:
        try:
            return FolderLock.take(lock, doing="downloading the same file")
        except UserError:
            shared.sleep(_POLL_SECONDS)


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
    with open_file(partial, "a+b") as file:
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
                shared.sleep(_WAITS[attempt])
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
