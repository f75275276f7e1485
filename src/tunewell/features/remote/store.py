"""One bucket or web host: list files, read ranges, upload. Every error is a UserError without access keys."""

# pyright: basic
# obstore ships its types as stubs that are not importable at run time.

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from tunewell.config.schema import Storage
from tunewell.core.errors import UserError
from tunewell.core.optional import import_optional
from tunewell.features.remote.access import CLIENT_OPTIONS, RETRY_CONFIG, Access, find_access
from tunewell.features.remote.address import Address
from tunewell.features.remote.problems import changed, explain, is_missing, is_range_refused, is_temporary, status_of
from tunewell.features.remote.redirects import final_host

T = TypeVar("T")

_WAITS = (1.0, 2.0, 4.0, 8.0)
"""Seconds between attempts of a throttled request, after the retries of the storage library."""
_PART_BYTES = 16 << 20
"""Part of an upload. Larger files are uploaded in parts; the object appears when all parts are complete."""


@dataclass(frozen=True)
class RemoteObject:
    """One stored file as the server lists it."""

    address: Address
    size: int
    stamp: str
    """A text that changes with the content: the ETag, or else the time of the last change and the size."""
    etag: str | None = None
    has_stamp: bool = True
    """False if the server gives neither: then the stamp is new at every listing, and the file is downloaded again."""
    host: str = ""
    """The host that a web address redirects to, if it is another one."""

    @property
    def name(self) -> str:
        return str(self.address)


class RemoteStore:
    """A bucket or a web host, with the settings of the config and the access keys that were found."""

    def __init__(self, address: Address, settings: Storage) -> None:
        self.address = address
        self.access: Access = find_access(address, settings)
        self._host = final_host(str(address)) if address.is_web else ""
        store = import_optional("obstore.store", extra="remote", purpose=f"reading `{address.scheme}://`")
        options: dict[str, Any] = {**CLIENT_OPTIONS}
        if (self.access.endpoint or "").startswith("http://"):
            options["allow_http"] = True
        common: dict[str, Any] = {"client_options": options, "retry_config": RETRY_CONFIG}
        try:
            self._store = self._open(store, common)
        except Exception as error:  # noqa: BLE001  the library raises one class for most errors
            raise self.explain(error, address) from None

    def _open(self, store: Any, common: dict[str, Any]) -> Any:
        address = self.address
        if address.is_web:
            return store.HTTPStore.from_url(f"{address.scheme}://{address.bucket}", **common)
        elif address.scheme in ("s3", "r2"):
            return store.S3Store(address.bucket, **self.access.options, **common)
        return store.from_url(f"{address.scheme}://{address.bucket}", **self.access.options, **common)

    def find(self, address: Address) -> RemoteObject | None:
        """Return one file, or None if it does not exist."""
        try:
            return self._object(self._request(address, lambda: self._head(address)))
        except FileNotFoundError:
            return None

    def list(self, prefix: Address) -> list[RemoteObject]:
        """Return all files below a prefix in the order of their keys, without the markers of empty folders."""
        entries = self._request(
            prefix, lambda: [entry for page in self._store.list(prefix.key or None, chunk_size=1000) for entry in page]
        )
        found = [self._object(entry) for entry in entries if not (entry["size"] == 0 and entry["path"].endswith("/"))]
        return sorted(found, key=lambda entry: entry.address.key)

    def read(self, entry: RemoteObject, *, start: int = 0, chunk_bytes: int = 1 << 20) -> Iterator[Any]:
        """Yield the bytes of an object from `start` on, as buffers; raise UserError if it was replaced.

        Errors of the connection are raised as they are: the caller may continue from the last byte.
        """
        options: dict[str, Any] = {"if_match": entry.etag} if entry.etag else {}
        ranged: dict[str, Any] = {"range": {"offset": start}} if start else {}
        try:
            answer, skipped = self._store.get(entry.address.key, options=options | ranged), 0
        except Exception as error:
            if not (ranged and is_range_refused(error)):
                raise
            answer, skipped = self._store.get(entry.address.key, options=options), start
        if entry.has_stamp and self._object(answer.meta).stamp != entry.stamp:  # servers without If-Match
            raise changed(entry.address)
        for chunk in answer.stream(min_chunk_size=chunk_bytes):
            yield memoryview(chunk)[skipped:] if skipped else chunk
            skipped = max(0, skipped - len(chunk))

    def read_all(self, address: Address) -> bytes | None:
        """Return the content of a small file, or None if it does not exist."""
        try:
            return bytes(self._request(address, lambda: self._store.get(address.key).bytes()))
        except FileNotFoundError:
            return None

    def upload(self, source: Path | bytes, address: Address) -> None:
        """Upload a file. Readers see the old or the new object, never a part of it."""
        self._request(address, lambda: self._store.put(address.key, source, chunk_size=_PART_BYTES, max_concurrency=4))

    def delete(self, address: Address) -> None:
        """Delete a file."""
        self._request(address, lambda: self._store.delete(address.key))

    def _head(self, address: Address) -> Any:
        try:
            return self._store.head(address.key)
        except Exception as error:
            # The answer to HEAD has no body. Only the answer to GET contains the reason of the error.
            if status_of(error) in (400, 401, 403, 405, 501):
                return self._store.get(address.key).meta
            raise

    def _request(self, address: Address, request: Callable[[], T]) -> T:
        """Run a request, and repeat it while the server throttles; raise FileNotFoundError or UserError."""
        for wait in (*_WAITS, None):
            try:
                return request()
            except (UserError, KeyboardInterrupt):
                raise
            except Exception as error:  # noqa: BLE001  the library raises one class for most errors
                if is_missing(error):
                    raise FileNotFoundError(str(address)) from None
                # A server that answers is overloaded. One that does not was retried; its name may be misspelled.
                if wait is None or status_of(error) is None or not is_temporary(error):
                    raise self.explain(error, address) from None
                time.sleep(wait)
        raise AssertionError("unreachable")

    def explain(self, error: Exception, address: Address) -> Exception:
        """Return the UserError for an error of the storage library; other errors unchanged."""
        if isinstance(error, (UserError, OSError)) and not is_missing(error):
            return error
        return explain(error, address, self.access)

    def _object(self, entry: Any) -> RemoteObject:
        etag, changed = entry.get("e_tag"), entry.get("last_modified")
        time_text = changed.isoformat() if isinstance(changed, datetime) and changed.timestamp() > 0 else ""
        is_weak = bool(etag) and etag.startswith("W/")  # If-Match never matches a weak ETag
        has_stamp = bool(etag or time_text)
        return RemoteObject(
            self.address.with_key(entry["path"]),
            int(entry["size"]),
            etag or f"{time_text if has_stamp else time.time_ns()} {entry['size']}",
            None if is_weak else etag,
            has_stamp,
            self._host if self._host != self.address.bucket else "",
        )
