"""Read Word files (.docx): headings, paragraphs, lists and tables in reading order."""

import io
import re
import struct
import zipfile
import zlib

from tunewell.core.optional import import_optional
from tunewell.features.retrieval.readers.blocks import ParsedDocument, TextBlock, Unreadable

_DAMAGED: tuple[type[Exception], ...] = (
    *(zipfile.BadZipFile, zlib.error, struct.error, OSError, EOFError, SyntaxError),
    *(LookupError, ValueError, AttributeError, TypeError, RuntimeError),
)
"""Errors of zipfile, lxml and python-docx for damaged files. SyntaxError is lxml's for invalid XML."""
_MAX_UNPACKED_BYTES = 512 << 20
_LEVEL = re.compile(r"(?:heading|überschrift|titre|título)\s*(\d)", re.IGNORECASE)


def read_docx(data: bytes) -> ParsedDocument:
    """Return the blocks of a Word file. Raise Unreadable if it is broken or unpacks to an absurd size."""
    docx = import_optional("docx", extra="retrieval", purpose="reading DOCX")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > _MAX_UNPACKED_BYTES:
                raise Unreadable("too_large")
        opened = docx.Document(io.BytesIO(data))
        title = opened.core_properties.title
        is_document = hasattr(opened.element, "body")
    except _DAMAGED as error:
        # A Word file with a password is not a zip archive.
        is_encrypted = data.startswith(b"\xd0\xcf\x11\xe0")
        raise Unreadable("encrypted" if is_encrypted else "broken", str(error)) from None
    if not is_document:
        raise Unreadable("broken", "it has no text")
    document = ParsedDocument(title=(title or "").strip() or None)
    items: list[str] = []

    def flush() -> None:
        if items:
            document.blocks.append(TextBlock("list", "\n".join(items)))
            items.clear()

    for part in opened.iter_inner_content():
        if hasattr(part, "rows"):
            flush()
            lines = [" | ".join(_cell_texts(row)) for row in part.rows]
            if any(line.strip(" |") for line in lines):
                header = lines[0] if len(lines) > 1 else ""
                document.blocks.append(TextBlock("table", "\n".join(lines), header=header))
            continue
        text, style = " ".join(part.text.split()), part.style.name if part.style is not None else ""
        if not text:
            continue
        level = 1 if style == "Title" else int(found[1]) if (found := _LEVEL.match(style)) else 0
        if not level and ("List" in style or (part._p.pPr is not None and part._p.pPr.numPr is not None)):
            items.append(f"- {text}")
            continue
        flush()
        document.blocks.append(TextBlock("heading", text, level) if level else TextBlock("text", text))
    flush()
    document.title = document.first_heading or document.title
    return document


def _cell_texts(row) -> list[str]:  # type: ignore[no-untyped-def]
    seen: list[str] = []
    last = None
    for cell in row.cells:
        if cell._tc is not last:  # a merged cell is listed once per column
            seen.append(" ".join(cell.text.split()))
        last = cell._tc
    return seen
