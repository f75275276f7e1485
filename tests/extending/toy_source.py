"""A toy data source: rows kept in this process, `memory://NAME.jsonl`."""

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tunewell.core.errors import UserError
from tunewell.data.sources.base import SourceOptions

FILES: dict[str, bytes] = {}


@dataclass(frozen=True)
class MemoryFile:
    """One entry of `FILES`."""

    name: str

    @classmethod
    def find(cls, path: str, *, base: Path, options: SourceOptions) -> list["MemoryFile"]:
        """Return the entry that the path names."""
        name = path.removeprefix("memory://")
        if name not in FILES:
            raise UserError(f"there is no `{path}`")
        return [cls(name)]

    def open(self) -> BinaryIO:
        """Open the entry for reading."""
        return io.BytesIO(FILES[self.name])

    def size(self) -> int:
        """Return the size in bytes."""
        return len(FILES[self.name])

    def stamp(self) -> str:
        """Return a hash of the content."""
        return hashlib.sha256(FILES[self.name]).hexdigest()
