"""The store protocol: read passages, and find those with given words or near a vector.

A store is written in one go from a spool of passages and vectors (`StoredPassages`), and readers see the old content
or the new content, never a mixture. To keep indexes elsewhere, write one class and add one line to `STORES`.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit, urlunsplit

import numpy as np

from tunewell.core.errors import UserError
from tunewell.core.files import parse_json
from tunewell.core.progress import ProgressListener
from tunewell.core.registry import Entry, Registry
from tunewell.data.reading_prompt import Passage
from tunewell.features.retrieval.records import IndexManifest, SearchSettings

_SCHEMES = {"postgres": "postgresql"}
_SECRET_VALUE = re.compile(r"(?i)[^=]*pass[^=]*=")
"""`password=`, `sslpassword=`, `passfile=` in the query of an address."""
_CONNECTION = re.compile(r"(?i)(?:^|[\s;])(?:host|server|dbname|user|uid|password|pwd)\s*=")
"""A connection string, such as `host=h password=PW`, which is not the name of a folder."""

Hits = list[tuple[int, float]]
"""Numbers of passages and their scores, best first."""


@dataclass(frozen=True)
class IndexedDocument:
    """A document of an index, and which passages are its own."""

    name: str
    sha256: str
    first: int
    num_passages: int
    num_duplicates: int
    """Number of its passages that equal those of an earlier document and were left out."""


class StoredPassages(Protocol):
    """New content for a store: passages with their vectors and words, read one after the other."""

    def __len__(self) -> int: ...

    def passages(self) -> Iterator[Passage]:
        """Yield the passages in order."""
        ...

    documents: list[IndexedDocument]
    vectors: np.ndarray
    """One row per passage, float32, of length one."""


class Store(Protocol):
    """An open index."""

    manifest: IndexManifest

    @classmethod
    def open(cls, address: str) -> "Store":
        """Open an index for reading; raise UserError if it is missing, damaged or of another version."""
        ...

    @classmethod
    def exists(cls, address: str) -> bool:
        """Return whether there is an index at this address."""
        ...

    @classmethod
    def lock(cls, address: str) -> AbstractContextManager[object]:
        """Keep other writers away; raise UserError if there is one."""
        ...

    @classmethod
    def write(
        cls, address: str, content: StoredPassages, manifest: IndexManifest, *, progress: ProgressListener
    ) -> IndexManifest:
        """Replace the content of an index, or create it. The old content stays until the new one is complete."""
        ...

    def search_words(self, words: Sequence[str], limit: int) -> Hits:
        """Return the passages with the highest BM25 score (k1 = 1.2, b = 0.75)."""
        ...

    def search_vectors(self, vector: np.ndarray, limit: int) -> Hits:
        """Return the passages with the highest cosine similarity."""
        ...

    def passages(self, numbers: Sequence[int]) -> list[Passage]:
        """Return passages by number."""
        ...

    def documents(self) -> list[IndexedDocument]:
        """Return the documents in the order of their passages."""
        ...

    def keys(self) -> Mapping[bytes, int]:
        """Return the hash of each passage with its number."""
        ...

    def vectors(self, numbers: Sequence[int]) -> np.ndarray:
        """Return vectors by number."""
        ...

    def num_passages_with(self, words: Sequence[str]) -> list[int]:
        """Return the number of passages that contain each word."""
        ...

    def set_settings(self, settings: SearchSettings) -> None:
        """Replace the search settings; raise UserError if another process has replaced the index."""
        ...

    def close(self) -> None:
        """Close files and connections."""
        ...


def json_line(value: Passage | IndexedDocument) -> bytes:
    """Return a passage or a document as one line of JSON, without its end."""
    return json.dumps(asdict(value), ensure_ascii=False).encode("utf-8", "replace")


def parse_passage(line: bytes | str) -> Passage:
    """Return the passage of one line of JSON."""
    row = parse_json(line)
    lines = tuple(row["lines"]) if row["lines"] else None
    return Passage(row["file"], row["title"], tuple(row["headings"]), row["text"], lines, row["page"])


STORES = Registry(
    "store",
    [
        Entry(
            "folder", "A folder on this machine. No server.", "tunewell.features.retrieval.stores.folder:FolderStore"
        ),
        Entry(
            "postgresql",
            "A PostgreSQL database with pgvector: `postgresql://USER@HOST/DATABASE#NAME`.",
            "tunewell.features.retrieval.stores.postgres:PostgresStore",
        ),
    ],
    group="stores",
)


def store_class(address: str) -> type[Store]:
    """Return the class for an address: a path, or `SCHEME://...`."""
    scheme, mark, _ = address.partition("://")
    if not mark and _CONNECTION.search(address):
        raise UserError(
            "an index cannot be kept in a connection string",
            fix="write `postgresql://USER@HOST/DATABASE#NAME`; the password is read from PGPASSWORD or `~/.pgpass`",
        )
    if not mark:
        return STORES.load("folder")
    scheme = _SCHEMES.get(scheme, scheme)
    if scheme in STORES.names():
        return STORES.load(scheme)
    raise UserError(
        f"an index cannot be kept in `{scheme}://`",
        fix="use a folder, or `postgresql://USER@HOST/DATABASE#NAME`",
    )


def shown_address(address: str) -> str:
    """Return an address for screens, errors and records: without its password."""
    if "://" not in address:
        return address
    try:
        parts = urlsplit(address)
    except ValueError:
        return address.partition("://")[0] + "://..."
    user, mark, host = parts.netloc.rpartition("@")
    query = "&".join(part for part in parts.query.split("&") if not _SECRET_VALUE.match(part))
    return urlunsplit((parts.scheme, user.partition(":")[0] + mark + host, parts.path, query, parts.fragment))


def open_store(address: str | Path) -> Store:
    """Open an index by its address."""
    return store_class(str(address)).open(str(address))
