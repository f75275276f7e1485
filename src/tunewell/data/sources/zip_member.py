"""A file inside a `.zip` file as a stream that raises UserError for damage."""

import io
import lzma
import struct
import zipfile
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from typing import BinaryIO, cast

from tunewell.core.errors import UserError

DAMAGE: tuple[type[Exception], ...] = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error),
    *(ArithmeticError, LookupError, ValueError, EOFError, RuntimeError),
)
"""Errors of `zipfile` for damaged files, found by fuzzing. An unknown compression and a password are RuntimeErrors."""


def open_member(stored: BinaryIO, name: str) -> BinaryIO:
    """Open a file of an archive. The stream raises UserError if the file is damaged."""
    return cast(BinaryIO, io.BufferedReader(_Member(stored, name)))


class _Member(io.RawIOBase):
    """A raw stream that reports a damaged member as an OSError."""

    def __init__(self, stored: BinaryIO, name: str) -> None:
        self._stored = stored
        with _reporting_damage():
            self._archive = zipfile.ZipFile(stored)
            self._member = self._archive.open(name)

    def close(self) -> None:
        self._member.close()
        self._archive.close()
        self._stored.close()
        super().close()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        with _reporting_damage():
            data = self._member.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


@contextmanager
def _reporting_damage() -> Generator[None]:
    """Raise UserError for the errors of damaged files."""
    try:
        yield
    except (*DAMAGE, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the disk; bz2 raises OSError without a number
            raise
        if isinstance(error, RuntimeError) and "encrypted" in str(error):
            raise UserError(
                "the `.zip` file is encrypted", fix="unpack it with its password, and use the unpacked file"
            ) from error
        raise UserError(f"the `.zip` file is damaged: {error}", fix="download the export again") from error
