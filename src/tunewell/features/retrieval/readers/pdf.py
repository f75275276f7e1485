"""Read PDF files: the text of each page, in paragraphs. Scanned pages have no text."""

import io
import logging
import re

from tunewell.core.optional import import_optional
from tunewell.features.retrieval.readers.blocks import ParsedDocument, TextBlock, Unreadable

_GAP = re.compile(r"\n[ \t]*\n+")
_HYPHEN = re.compile(r"(?<=\w)[-\u00ad]\n(?=[a-zà-ÿ])")
_DAMAGED = (ValueError, KeyError, IndexError, TypeError, AttributeError, OSError, RecursionError, NotImplementedError)


def read_pdf(data: bytes) -> ParsedDocument:
    """Return the paragraphs of a PDF file with their page. Raise Unreadable if it is encrypted, broken or scanned."""
    pypdf = import_optional("pypdf", extra="retrieval", purpose="reading PDF")
    logging.getLogger("pypdf").setLevel(logging.ERROR)
    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise Unreadable("encrypted")
        pages = [page.extract_text() or "" for page in reader.pages]
        title = (reader.metadata.title if reader.metadata else None) or None
    except (pypdf.errors.PyPdfError, *_DAMAGED) as error:
        needs_key = "cryptography" in str(error).lower()
        raise Unreadable(
            "encrypted" if needs_key else "broken", str(error).splitlines()[0] if str(error) else ""
        ) from None
    document = ParsedDocument(title=" ".join(title.split()) if isinstance(title, str) else None)
    for number, page in enumerate(pages, 1):
        for part in _GAP.split(_HYPHEN.sub("", page)):
            if text := part.strip():
                document.blocks.append(TextBlock("text", text, page=number))
    if not document.blocks:
        raise Unreadable("no_text")
    missing = sum(not page.strip() for page in pages)
    if missing:
        document.notes.append(f"{missing} of {len(pages)} pages have no text (scanned?)")
    return document
