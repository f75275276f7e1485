"""Remote files as a data source: an object, a prefix or a glob in a bucket, or a file on a web server.

Files are downloaded into the cache when the first of them is read, several at once. A file that is in the cache is read
like a local one, while the next ones are downloaded.
"""

from dataclasses import dataclass, field
from operator import eq
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from tunewell.core.errors import UserError, did_you_mean
from tunewell.core.progress import Progress
from tunewell.data.sources.base import READABLE, SourceOptions, detect_format
from tunewell.data.sources.local import select_row_files
from tunewell.features.remote.address import Address, compile_pattern, listing_prefix, parse_address
from tunewell.features.remote.cache import ObjectCache, cache_key
from tunewell.features.remote.fetch import Downloads
from tunewell.features.remote.store import RemoteObject, RemoteStore

_NUM_SUGGESTED = 8


@dataclass
class _Batch:
    """Files that are downloaded together: those of one source, or a single file of a source with a limit."""

    cache: ObjectCache
    downloads: Downloads | None
    """None in offline mode."""

    def fetch(self, entry: RemoteObject) -> tuple[Path, str]:
        """Return the path in the cache and the SHA-256 of a file."""
        if self.downloads is not None:
            return self.downloads.fetch(entry)
        place = self.cache.find(cache_key(entry.address), entry)
        if place is None:
            raise _not_downloaded(entry.name)
        return place


@dataclass(frozen=True)
class RemoteFile:
    """A file in object storage or on a web server."""

    entry: RemoteObject
    batch: _Batch = field(repr=False, compare=False)

    @classmethod
    def find(cls, path: str, *, base: Path, options: SourceOptions) -> list["RemoteFile"]:
        """Return the files of an address, prefix or pattern in the order of their keys; raise UserError if none."""
        address = parse_address(path)
        cache, store = ObjectCache(options.storage), None
        if options.storage.offline:
            found = cache.load_listing(cache_key(address), address)
            if found is None:
                raise _not_downloaded(path)
        else:
            options.progress(Progress(f"listing {path}"))
            store = RemoteStore(address, options.storage)
            found = _list(store, address)
            _require_content(found)
            cache.save_listing(cache_key(address), found)
        files: list[RemoteFile] = []
        for group in [[entry] for entry in found] if options.has_limit else [found]:
            batch = _Batch(cache, Downloads(store, group, cache, options.progress) if store else None)
            files += [cls(entry, batch) for entry in group]
        return files

    @property
    def name(self) -> str:
        return self.entry.name

    def open(self) -> BinaryIO:
        """Open the cached copy; download it first if necessary."""
        return self.batch.fetch(self.entry)[0].open("rb")

    def size(self) -> int:
        """Return the size in bytes."""
        return self.entry.size

    def stamp(self) -> str:
        """Return the version that was listed. Its copy in the cache does not change."""
        return self.entry.stamp

    def sha256(self) -> str:
        """Return the SHA-256, computed during the download."""
        return self.batch.fetch(self.entry)[1]

    def version(self) -> str:
        """Return the ETag, or the time of the last change and the size; empty if the server reports neither.

        It ends in the host that sent the file, if the server redirected to it.
        """
        host = f" from {self.entry.host}" if self.entry.host else ""
        return self.entry.stamp.strip('"') + host if self.entry.has_stamp else ""


def _list(store: RemoteStore, address: Address) -> list[RemoteObject]:
    if address.is_pattern:
        return _list_pattern(store, address)
    if address.key and not address.key.endswith("/") and (entry := store.find(address)) is not None:
        return [entry]
    if address.is_web:
        raise UserError(f"there is no file `{address}`", fix="check the address; it must name one file")
    prefix = address.with_key(address.key.rstrip("/"))
    return _row_files(store, prefix, store.list(prefix))


def _list_pattern(store: RemoteStore, address: Address) -> list[RemoteObject]:
    prefix, pattern = address.with_key(listing_prefix(address.key)), compile_pattern(address.key)
    listed = store.list(prefix)
    found = [entry for entry in listed if pattern.fullmatch(entry.address.key)]
    if not found:
        named = ", ".join(entry.address.key for entry in listed[:_NUM_SUGGESTED])
        raise UserError(
            f"no object matches `{address}`",
            where=f"searched {len(listed):,} objects of `{prefix}`",
            fix=f"objects there: {named}" if named else "check the bucket and the prefix: there are no objects",
        )
    return _select(found)


def _row_files(store: RemoteStore, prefix: Address, listed: list[RemoteObject]) -> list[RemoteObject]:
    visible = [entry for entry in listed if "/." not in f"/{entry.address.key}"]
    found = [entry for entry in visible if detect_format(entry.address.key)[0]]
    if found:
        return _select(found)
    if listed:
        raise UserError(f"the prefix `{prefix}` contains no readable object", fix=f"put files there: {READABLE}")
    above = prefix.with_key(prefix.key.rpartition("/")[0])
    beside = [entry.address.key for entry in store.list(above)] if prefix.key else []
    keys = sorted(beside, key=lambda key: -sum(map(eq, key, prefix.key)))[:3]
    raise UserError(
        f"there is no object and no prefix `{prefix}`" if prefix.key else f"the bucket `{prefix.bucket}` is empty",
        where=store.access.shown_endpoint,
        fix=did_you_mean([str(prefix.with_key(key)) for key in keys], "check the address"),
    )


def _select(found: list[RemoteObject]) -> list[RemoteObject]:
    """Return the objects without those that describe the others, by the rules for local folders."""
    chosen = set(select_row_files([PurePosixPath(entry.address.key) for entry in found]))
    return [entry for entry in found if PurePosixPath(entry.address.key) in chosen]


def _require_content(found: list[RemoteObject]) -> None:
    empty = [entry.name for entry in found if not entry.size]
    if empty:
        more = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
        raise UserError(
            f"`{empty[0]}`{more} is empty (0 bytes)",
            fix="upload it again, or leave it out: name the other objects, or a pattern that does not match it",
        )


def _not_downloaded(name: str) -> UserError:
    return UserError(
        f"`{name}` has not been downloaded, and offline mode is on",
        fix="run the command once without `--offline` (or `storage.offline`); the files stay in the cache",
    )
