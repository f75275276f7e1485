"""Read text of any size in chunks of bounded memory: UTF-8 or UTF-16, without ANSI codes, with numbered lines.

Lines are counted by line feeds, as editors do. A carriage return, with which progress bars overwrite themselves,
becomes a vertical tab: white space for patterns, but no new line. Chunks overlap, so that a
message at a border is found.
"""

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from tunewell.core.redact import redact

CHUNK_BYTES = 1 << 20
OVERLAP_BYTES = 1 << 14
_ANSI = re.compile(rb"\x1b(?:\[[0-9;?]{0,40}[ -/]?[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)|[()][A-Z0-9]|[=>78])")
_RANK = re.compile(rb"(?m)^\[(?:rank|default)?(\d{1,5})\]: ?")
_PLAIN = (
    *((quote.encode(), b"'") for quote in "\u2018\u2019\u201b"),
    *((quote.encode(), b'"') for quote in "\u201c\u201d\u201f"),
    ("\u00a0".encode(), b" "),
    ("\ufeff".encode(), b""),
)


@dataclass(frozen=True)
class Chunk:
    """A part of a text. `first_line` is the number of its first line; bytes before `fresh` are in the last chunk."""

    data: bytes
    first_line: int
    fresh: int = 0

    def line_of(self, at: int) -> int:
        """Return the number of the line that contains a byte."""
        return self.first_line + self.data.count(b"\n", 0, at)


def clean(data: bytes) -> bytes:
    """Remove ANSI codes and rank prefixes, and make quotes, spaces and line ends plain."""
    if b"\x1b" in data:
        data = _ANSI.sub(b"", data)
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\x0b")
    if b"\xe2\x80" in data or b"\xc2\xa0" in data or b"\xef\xbb\xbf" in data:
        for fancy, plain in _PLAIN:
            data = data.replace(fancy, plain)
    return _RANK.sub(b"", data) if b"]:" in data else data


def read_chunks(file: BinaryIO, *, head: bytes = b"") -> Iterator[Chunk]:
    """Yield the cleaned chunks of a file, whose `head` was read already. A chunk ends at a line feed where it can."""
    carried, line, fresh = b"", 1, 0
    for piece in _utf8_pieces(file, head):
        data = clean(carried + piece)
        # Keep back what may continue in the next piece: an unfinished line, but never more than the overlap.
        cut = data.rfind(b"\n") + 1
        if not cut or len(data) - cut > OVERLAP_BYTES:
            cut = len(data)
        yield Chunk(data[:cut], line, min(fresh, cut))
        start = _overlap_start(data, cut)
        line += data.count(b"\n", 0, start)
        carried, fresh = data[start:], cut - start
    if carried and len(carried) > fresh:
        yield Chunk(clean(carried), line, fresh)


def _overlap_start(data: bytes, cut: int) -> int:
    start = max(0, cut - OVERLAP_BYTES)
    border = data.find(b"\n", start, cut)
    return border + 1 if 0 <= border < cut - 1 else start


def _utf8_pieces(file: BinaryIO, head: bytes) -> Iterator[bytes]:
    piece = head + file.read(CHUNK_BYTES)
    encoding = utf16_of(piece)
    decoder = codecs.getincrementaldecoder(encoding)("replace") if encoding else None
    while piece:
        yield decoder.decode(piece).encode("utf-8", "replace") if decoder else piece
        piece = file.read(CHUNK_BYTES)


def utf16_of(head: bytes) -> str | None:
    """Return the UTF-16 encoding of a text by its byte-order mark or its zero bytes, or None."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    sample = head[:4096]
    if len(sample) < 8 or sample.count(0) < len(sample) // 3:
        return None
    odd, even = sample[1::2].count(0), sample[::2].count(0)
    if odd > 0.6 * len(sample) / 2 > even:
        return "utf-16-le"
    return "utf-16-be" if even > 0.6 * len(sample) / 2 > odd else None


_WIDE, _LONGEST_LINE = 2000, 300


def line_around(chunk: Chunk, start: int, end: int) -> str:
    """Return the line of a match, shortened to its surroundings if it is long."""
    data = chunk.data
    begin = max(data.rfind(b"\n", 0, start), data.rfind(b"\x0b", 0, start)) + 1
    stops = [at for at in (data.find(b"\n", end), data.find(b"\x0b", end)) if at >= 0]
    stop = min(stops, default=len(data))
    if stop - begin > _LONGEST_LINE:
        # Secrets are replaced before the line is cut, because a part of one is not recognised.
        before = redact(data[max(begin, start - _WIDE) : start].decode("utf-8", "replace"))[-_LONGEST_LINE // 4 :]
        after = redact(data[start : min(stop, start + _WIDE)].decode("utf-8", "replace"))
        return " ".join((before + after).split())[:_LONGEST_LINE]
    return " ".join(data[begin:stop].decode("utf-8", "replace").split())[: 2 * _LONGEST_LINE]
