"""A `.zip` file as a source: the row file inside an export of ChatGPT, Claude, Telegram or WhatsApp."""

import io
import lzma
import re
import struct
import zipfile
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import BinaryIO, cast

from tunewell.core.errors import UserError
from tunewell.data.sources.base import SourceFile, detect_format

_CHATS = re.compile(r"(.*/)?(conversations\.json|result\.json|_chat\.txt|WhatsApp[^/]*\.txt)", re.DOTALL)
"""The file with the conversations in an export; everything else is pictures, accounts and settings."""
_NUM_NAMED = 6
_DAMAGE: tuple[type[Exception], ...] = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error),
    *(ArithmeticError, LookupError, ValueError, EOFError, RuntimeError),
)
"""Errors of `zipfile` for damaged files, found by fuzzing. An unknown compression and a password are RuntimeErrors."""


def open_member(stored: BinaryIO, name: str) -> BinaryIO:
    """Open a file of an archive. Errors while it is read are those of a damaged file."""
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
    except (*_DAMAGE, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the disk; bz2 raises OSError without a number
            raise
        if isinstance(error, RuntimeError) and "encrypted" in str(error):
            raise UserError(
                "the `.zip` file is encrypted", fix="unpack it with its password, and use the unpacked file"
            ) from error
        raise UserError(f"the `.zip` file is damaged: {error}", fix="download the export again") from error


def open_archive(file: SourceFile) -> SourceFile:
    """Return the row file inside a `.zip` file; raise UserError if there is none or more than one."""
    try:
        with file.open() as stored, zipfile.ZipFile(stored) as archive:
            names = [info.filename for info in archive.infolist() if not info.is_dir()]
    except _DAMAGE as error:
        raise UserError(
            f"`{file.name}` is not a complete `.zip` file", fix="copy or download the file again"
        ) from error
    names = [name for name in names if not name.startswith("__MACOSX/")]
    chats = [name for name in names if _CHATS.fullmatch(name)]
    rows = chats or [name for name in names if detect_format(name)[0] not in (None, "zip")]
    if len(rows) != 1:
        shown = ", ".join(rows[:_NUM_NAMED] or names[:_NUM_NAMED])
        raise UserError(
            f"`{file.name}` contains {'several row files' if rows else 'no row file'}: {shown}",
            fix="unpack it, and name the files in `data.sources`",
        )
    file_format, compression = detect_format(rows[0])
    return replace(file, member=rows[0], format=str(file_format), compression=compression)
