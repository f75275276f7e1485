"""Documents of every format, made with the libraries that write them."""

import io
from pathlib import Path
from typing import Any


def pdf(*pages: str, title: str = "", password: str = "") -> bytes:
    """Return a PDF file with lines of text on each page; an empty page has none, like a scan."""
    import pypdf
    from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

    writer = pypdf.PdfWriter()
    for text in pages:
        page = writer.add_blank_page(300, 300)
        font = DictionaryObject(
            {
                NameObject("/Type"): NameObject("/Font"),
                NameObject("/Subtype"): NameObject("/Type1"),
                NameObject("/BaseFont"): NameObject("/Helvetica"),
            }
        )
        fonts = DictionaryObject({NameObject("/F1"): writer._add_object(font)})
        page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
        shown = "".join(f"({line}) Tj 0 -14 Td " for line in text.split("\n") if line)
        stream = DecodedStreamObject()
        stream.set_data(f"BT /F1 12 Tf 20 260 Td {shown}ET".encode("latin-1"))
        page[NameObject("/Contents")] = writer._add_object(stream)
    if title:
        writer.add_metadata({"/Title": title})
    if password:
        writer.encrypt(password, algorithm="RC4-128")
    target = io.BytesIO()
    writer.write(target)
    return target.getvalue()


def docx(build: Any) -> bytes:
    """Return a Word file; `build` gets the empty document."""
    import docx as python_docx

    document = python_docx.Document()
    build(document)
    target = io.BytesIO()
    document.save(target)
    return target.getvalue()


def write_pages(folder: Path, number: int) -> Path:
    """Write so many small Markdown pages, each about something else."""
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(number):
        text = f"# Page {index}\n\nThe code word of page {index} is `w{index * 7919 % 100_003}`.\n"
        (folder / f"page-{index:04}.md").write_text(text, encoding="utf-8")
    return folder
