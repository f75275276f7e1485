"""Read a file line by line in bounded memory: decompression, encodings, over-long lines."""

import codecs
import gzip
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import IO, cast

from tunewell.core.errors import UserError
from tunewell.core.units import size_bytes
from tunewell.data.sources.arrow import decompress_zstd
from tunewell.data.sources.base import ReadOptions, SourceFile

_BLOCK_BYTES = 1 << 20
MAX_BLANK_BYTES = 4 << 20
"""Maximum size of white space in a row. A small `.gz` file can contain billions of blank lines."""
_BLANK = b" \t\r\n\0"
_BOMS = (  # UTF-32 first, because its little-endian mark begins with that of UTF-16
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
# Which of the first four bytes are zero in a file that begins with two ASCII characters and has no byte order mark.
_ZEROS: dict[tuple[bool, ...], str] = {
    (False, True, True, True): "utf-32-le",
    (True, True, True, False): "utf-32-be",
    (False, True, False, True): "utf-16-le",
    (True, False, True, False): "utf-16-be",
}


_CP1252_FORMATS = ("csv", "tsv", "txt", "md")
_NOT_CP1252 = b"\0\x81\x8d\x8f\x90\x9d"
"""Bytes that stand for no character of cp1252, the encoding of Windows in Western Europe and America."""
_UTF8_CHARACTER = re.compile(rb"[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}")
_ASCII = bytes(range(128))


def _escape(error: UnicodeError) -> tuple[str, int]:
    """Decode an invalid byte as a lone surrogate, which the cleaning step detects."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return chr(0xDC00 | 0x80 | error.object[error.start]), error.end


# Python's `surrogateescape` works only for ASCII-based encodings, not for UTF-16 and UTF-32.
codecs.register_error("tunewell-escape", _escape)


@dataclass(frozen=True)
class TooLong:
    """A line that exceeds the size limit. Its text is not stored."""

    num_bytes: int


def read_bytes(file: SourceFile) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file in blocks.

    Raises UserError for damaged or truncated compressed data, and for megabytes of white space.
    """
    try:
        with file.open() as stored:
            stream: IO[bytes] = stored
            if file.compression == "gzip":
                stream = cast(IO[bytes], gzip.GzipFile(fileobj=stored))
            elif file.compression == "zstd":
                stream = decompress_zstd(stored)
            num_blank = 0
            while block := stream.read(_BLOCK_BYTES):
                num_blank = 0 if block.strip(_BLANK) else num_blank + len(block)
                if num_blank > MAX_BLANK_BYTES:
                    raise UserError(
                        f"`{file.name}` has more than {size_bytes(MAX_BLANK_BYTES)} of blank lines in a row",
                        fix="the file is damaged or has no rows; check it, and remove the blank lines",
                    )
                yield block
    except (EOFError, OSError, zlib.error) as error:
        if file.compression is None or (isinstance(error, OSError) and error.errno is not None):
            raise
        raise UserError(
            f"`{file.name}` cannot be decompressed: {error}", fix="the file may be truncated; copy or download it again"
        ) from error


def detect_encoding(file: SourceFile, configured: str) -> str:
    """Return the configured encoding, or else the one indicated by the first bytes, or else UTF-8.

    Tables and text files that are not UTF-8 are cp1252, as Excel writes them, if every byte has a meaning there.
    """
    if configured != "auto":
        try:
            return codecs.lookup(configured).name
        except LookupError as error:
            raise UserError(f"unknown encoding `{configured}`", fix="try `utf-8` or `cp1252`") from error
    start = next(read_bytes(file), b"")
    marked = next((name for mark, name in _BOMS if start.startswith(mark)), None)
    found = marked or _ZEROS.get(tuple(byte == 0 for byte in start[:4]), "utf-8")
    # Some shells append UTF-8 to a file whose first line is UTF-16. Decoded as UTF-16, all rows would become one row.
    is_mixed = file.format not in ("txt", "md") and b"\0" not in start[-len(start) // 4 :]
    if is_mixed or found == "utf-8":
        return "cp1252" if not marked and file.format in _CP1252_FORMATS and _is_cp1252(file) else "utf-8"
    return found


def _is_cp1252(file: SourceFile) -> bool:
    """Return whether a file is not UTF-8, but can be cp1252. A few damaged bytes in a UTF-8 file do not count."""
    try:
        for _ in codecs.iterdecode(read_bytes(file), "utf-8"):
            pass
    except UnicodeDecodeError:
        num_valid = num_invalid = 0
        for block in read_bytes(file):
            if len(block.translate(None, _NOT_CP1252)) != len(block):
                return False
            rest, number = _UTF8_CHARACTER.subn(b"", block)
            num_valid += number
            num_invalid += len(rest.translate(None, _ASCII))
        return num_invalid > num_valid
    return False


def read_utf8(file: SourceFile, encoding: str) -> Iterator[bytes]:
    """Yield the text of a file in blocks of UTF-8 without a byte order mark; invalid bytes become invalid UTF-8."""
    blocks = read_bytes(file)
    if encoding not in ("utf-8", "utf-8-sig"):
        texts = codecs.iterdecode(blocks, encoding, errors="tunewell-escape")
        blocks = (text.encode("utf-8", "surrogatepass") for text in texts)
    yield next(blocks, b"").removeprefix(codecs.BOM_UTF8)
    yield from blocks


def read_lines(
    file: SourceFile, *, encoding: str, max_bytes: int, keep_ends: bool = False
) -> Iterator[bytes | TooLong]:
    """Yield each line as UTF-8, with invalid bytes unchanged; a line over `max_bytes` is yielded as `TooLong`."""
    return split_lines(read_utf8(file, encoding), max_bytes=max_bytes, keep_ends=keep_ends)


def numbered_lines(file: SourceFile, options: ReadOptions) -> Iterator[tuple[int, bytes | TooLong]]:
    """Yield each line like `read_lines`, with its number from 1. The encoding must be known."""
    return enumerate(read_lines(file, encoding=options.encoding, max_bytes=options.max_row_bytes), start=1)


def split_lines(blocks: Iterable[bytes], *, max_bytes: int, keep_ends: bool = False) -> Iterator[bytes | TooLong]:
    """Split blocks into lines at `\\n` and `\\r\\n`, independent of the block boundaries."""
    held: list[bytes] = []
    num_held = 0
    for block in blocks:
        *whole, rest = block.split(b"\n")
        for part in whole:
            num_bytes = num_held + len(part)
            if num_bytes > max_bytes:
                yield TooLong(num_bytes)
            else:
                line = b"".join([*held, part]) if held else part
                yield line + b"\n" if keep_ends else line.removesuffix(b"\r")
            held, num_held = [], 0
        num_held += len(rest)
        if num_held > max_bytes:
            held = []
        elif rest:
            held.append(rest)
    if num_held > max_bytes:
        yield TooLong(num_held)
    elif held:
        yield b"".join(held) if keep_ends else b"".join(held).removesuffix(b"\r")


_LATIN = ("cp1252", "cp1250", "mac_roman", "cp850")
_OTHER = ("shift_jis", "cp1251", "gb18030", "euc_kr", "big5")
_MAX_ACCENTED = 0.4
"""Share of letters outside ASCII above which a text is not written in Latin letters."""
_SAMPLE_CHARS = 60


def likely_encodings(file: SourceFile) -> list[tuple[str, str]]:
    """Return encodings in which a file that is not UTF-8 can be read, each with a line that differs between them.

    Latin encodings come first if the text looks like it. The list is empty for UTF-8 and for other files whose first
    bytes name the encoding.
    """
    if file.format not in _CP1252_FORMATS or detect_encoding(file, "auto") not in ("cp1252", "utf-8"):
        return []
    start = next(read_bytes(file), b"")
    lines = [line.strip() for line in start.splitlines()[:-1] or [start]]
    foreign = [line for line in lines if not line.isascii()]
    try:
        b"\n".join(foreign).decode("utf-8")
        return []
    except UnicodeDecodeError:
        pass
    found: dict[str, str] = {}
    letters = [mark for mark in b"\n".join(foreign).decode("latin-1") if mark.isalpha() or not mark.isascii()]
    is_latin = sum(not mark.isascii() for mark in letters) < _MAX_ACCENTED * len(letters)
    for name in (*_LATIN, *_OTHER) if is_latin else (*_OTHER, *_LATIN):
        try:
            text = b"\n".join(foreign).decode(name)
        except UnicodeDecodeError:
            continue
        if text.replace("\n", "").isprintable():
            found.setdefault(_around_foreign(text), name)
    return [(name, sample) for sample, name in found.items()]


def _around_foreign(text: str) -> str:
    """Return the part of the first line around its first character that is not ASCII."""
    line = text.partition("\n")[0]
    at = next((index for index, mark in enumerate(line) if not mark.isascii()), 0)
    return line[max(0, at - _SAMPLE_CHARS // 2) :][:_SAMPLE_CHARS]
