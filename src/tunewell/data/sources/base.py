"""The data source protocol: one file of rows that can be opened, wherever it is stored.

To read rows from another storage, write one class like `local.LocalFile` or `remote.RemoteFile` and add one line to
`SOURCES`. Formats (JSONL, CSV, Parquet, ...) and compression are handled by the readers, not by the source.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Protocol, runtime_checkable

from tunewell.config.rules import Storage
from tunewell.config.schema import SourceConfig
from tunewell.core.errors import UserError
from tunewell.core.features import extension_entries
from tunewell.core.files import hub_address, is_url, read_data, sha256_stream
from tunewell.core.progress import ProgressListener, silent
from tunewell.core.registry import Entry, Registry

LOCAL = "file"
"""The scheme of paths without `://`."""


@dataclass(frozen=True)
class SourceOptions:
    """Options for finding the files of a source."""

    storage: Storage = field(default_factory=Storage)
    config: str | None = None
    """The configuration of a dataset of the hub."""
    split: str | None = None
    """The split of a dataset of the hub."""
    progress: ProgressListener = silent
    has_limit: bool = False
    """True if the last files may not be needed: a file is downloaded when it is read, and none before."""


_DEFAULTS = SourceOptions()


class Source(Protocol):
    """One file of rows in some storage."""

    @property
    def name(self) -> str:
        """The name in ledgers, documents and errors, with the file extension. It is the same on every machine."""
        ...

    def open(self) -> BinaryIO:
        """Open the file for reading; the stream must be seekable for Parquet and Arrow files."""
        ...

    def size(self) -> int:
        """Return the size in bytes."""
        ...

    def stamp(self) -> str:
        """Return a text that changes when the file is modified: a time, a version or an ETag."""
        ...


class StoredSource(Source, Protocol):
    """A class of `SOURCES`: a source that finds the files of a path."""

    @classmethod
    def find(cls, path: str, *, base: Path, options: SourceOptions) -> Sequence["Source"]:
        """Return the files of a path, folder or pattern in a stable order; raise UserError if there are no files.

        Relative paths are resolved from `base`, the folder of the config.
        """
        ...


@runtime_checkable
class VersionedSource(Protocol):
    """A source with the hash of its content and the version that the storage reports."""

    def sha256(self) -> str:
        """Return the SHA-256 of the stored bytes."""
        ...

    def version(self) -> str:
        """Return the version for the manifest: an ETag, or the commit of a dataset; empty if there is none.

        Two files with the same name and version have the same content. It must not need a download.
        """
        ...


SOURCES = Registry(
    "data source",
    [
        Entry(
            LOCAL,
            "Files on this machine: a path, a folder, a glob or a saved Hugging Face dataset.",
            "tunewell.data.sources.local:LocalFile",
        ),
        *(Entry(*entry) for entry in extension_entries("data source")),
    ],
    group="sources",
)

TABLE = read_data(__file__, "files.toml")
READABLE: str = TABLE["readable"]
UNREADABLE: dict[str, str] = TABLE["unreadable"]
"""Extensions that cannot be read -> what to do."""
BINARY_FORMATS = ("parquet", "arrow", "zip", "excel")
"""Formats that compress internally and have no encoding."""
TOKENIZED = "corpus"
"""The format of packed shards, sources that have tokens."""


@dataclass(frozen=True)
class ReadOptions:
    """Options that affect how the bytes of a file become rows."""

    max_row_bytes: int
    max_nesting: int
    text_rows: str = "paragraph"
    encoding: str = "auto"
    limit: int | None = None
    format: str = "auto"
    """The configured format; `auto`: files of exported conversations are detected."""
    paths: str = "best"
    assistant: str | None = None
    gap_hours: float = 8.0
    separator: str = "auto"

    @classmethod
    def of(cls, source: SourceConfig, max_row_bytes: int, max_nesting: int) -> "ReadOptions":
        """Return how the files of a source are read."""
        return cls(
            max_row_bytes,
            max_nesting,
            text_rows=source.text_rows,
            encoding=source.encoding,
            limit=source.limit,
            format=source.format,
            paths=source.paths,
            assistant=source.assistant,
            gap_hours=source.gap_hours,
            separator=source.separator,
        )


@dataclass(frozen=True)
class SourceFile:
    """One file of rows, with its source, format and compression."""

    source: Source
    name: str
    """The name in ledgers, documents and errors, relative to the config and never absolute."""
    format: str
    compression: str | None = None
    member: str = ""
    """The file inside of a `.zip` file."""

    def open(self) -> BinaryIO:
        """Open the stored bytes, before decompression."""
        if not self.member:
            return self.source.open()
        from tunewell.data.sources.zip_member import open_member  # not needed for other files

        return open_member(self.source.open(), self.member)

    def sha256(self) -> str:
        """Return the SHA-256 of the stored bytes."""
        if isinstance(self.source, VersionedSource):
            return self.source.sha256()
        with self.open() as stream:
            return sha256_stream(stream)

    def version(self) -> str:
        """Return the version of a remote file, or an empty text."""
        return self.source.version() if isinstance(self.source, VersionedSource) else ""


def require_unique_columns(names: Sequence[str], where: str, first_line: str | None = None) -> None:
    """Raise UserError if two columns of a table, which `where` names, have the same name."""
    if twice := next((name for name in names if name and names.count(name) > 1), None):
        raise UserError(
            f"{where} has {names.count(twice)} columns named `{twice}`",
            where=first_line,
            fix="rename or delete one of them",
        )


def split_limit(path: str) -> tuple[str, int | None]:
    """Split `rows.jsonl#500` into path and limit; a hub id becomes its address.

    A `#` in the name of an existing file is part of the name.
    """
    head, mark, tail = path.rpartition("#")
    if mark and tail.isdigit() and not Path(path).exists():
        return hub_address(head, Path()), int(tail)
    return hub_address(path, Path()), None


def find_files(path: str, *, base: Path, options: SourceOptions = _DEFAULTS) -> list[SourceFile]:
    """Return the files of one entry of `data.sources` in a stable order; raise UserError if there are no files."""
    scheme = path.partition("://")[0].lower() if is_url(path) else LOCAL
    if scheme not in SOURCES.names():
        known = ", ".join(f"`{name}://`" for name in SOURCES.names())
        raise UserError(
            f"cannot read `{path}`: `{scheme}://` is not a known data source",
            fix=f"copy the file to this machine and give its path; known: {known}",
        )
    source_class: type[StoredSource] = SOURCES.load(scheme)
    return [_source_file(source) for source in source_class.find(path, base=base, options=options)]


def detect_format(name: str) -> tuple[str | None, str | None]:
    """Return the format and the compression of a file name; the format is None if the extension is unknown."""
    path = PurePosixPath(name)
    compression = TABLE["compressions"].get(path.suffix.lower())
    stem = path.with_suffix("") if compression else path
    return TABLE["formats"].get(stem.suffix.lower()), compression


def _source_file(source: Source) -> SourceFile:
    name = PurePosixPath(source.name).name
    file_format, compression = detect_format(name)
    if file_format is None and (advice := UNREADABLE.get(suffix := PurePosixPath(name).suffix.lower())):
        raise UserError(f"`{name}`: `{suffix}` files cannot be read", fix=advice)
    if file_format is None:
        raise UserError(f"`{name}` has no known file extension", fix=f"convert the file to one of {READABLE}")
    if compression and file_format in BINARY_FORMATS:
        raise UserError(f"`{name}` is compressed twice", fix="decompress it: this format compresses internally")
    return SourceFile(source, source.name, file_format, compression)
