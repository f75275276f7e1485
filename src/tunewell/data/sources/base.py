"""The data source protocol: one file of rows that can be opened, wherever it is stored.

To read rows from another storage (`s3://`, `gs://`, `https://`), write one class like `local.LocalFile` and add one
line to `SOURCES`. Formats (JSONL, CSV, Parquet, ...) and compression are handled by the readers, not by the source.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from tunewell.core.registry import Entry, Registry

LOCAL = "file"
"""The scheme of paths without `://`."""


class Source(Protocol):
    """One file of rows in some storage."""

    @property
    def name(self) -> str:
        """Name in ledgers, documents and errors, with the file extension; the same on every machine."""
        ...

    @classmethod
    def find(cls, path: str, *, base: Path) -> Sequence["Source"]:
        """Return the files behind a path, folder or pattern, in a stable order; raise UserError if there are none.

        `base` is the folder of the config, from which relative paths start.
        """
        ...

    def open(self) -> BinaryIO:
        """Open the file for reading; the stream must be seekable for Parquet and Arrow files."""
        ...

    def size(self) -> int:
        """Return the size in bytes."""
        ...

    def stamp(self) -> str:
        """Return a text that changes when the file is written to: a time, a version, an ETag."""
        ...


SOURCES = Registry(
    "data source",
    [
        Entry(
            LOCAL,
            "Files on this machine: a path, a folder, a glob or a saved Hugging Face dataset.",
            "tunewell.data.sources.local:LocalFile",
        ),
    ],
)
