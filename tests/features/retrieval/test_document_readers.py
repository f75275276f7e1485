"""Every format becomes blocks with the right kind, text, lines and pages; what has no text says why."""

import pytest
from sample_files import docx, pdf

from tunewell.features.retrieval.readers.blocks import ParsedDocument, TextBlock, Unreadable, decode
from tunewell.features.retrieval.readers.docx import read_docx
from tunewell.features.retrieval.readers.html import read_html
from tunewell.features.retrieval.readers.markdown import read_markdown, read_text
from tunewell.features.retrieval.readers.pdf import read_pdf
from tunewell.features.retrieval.readers.rows import read_csv, read_json_lines

MARKDOWN = """---
layout: page
title: "Hazelquay College"
---
# Hazelquay

First paragraph
on two lines.

Fees
----

| item | fee |
|------|-----|
| one  | 120 |
| two  | 95  |

- apply
  by post
- or online

    still the list

```python
# not a heading
x = 1
```
### Deep ###
Last line"""


def shapes(document: ParsedDocument) -> list[tuple[str, str, tuple[int, int] | None]]:
    return [(block.kind, block.text.split("\n")[0], block.lines) for block in document.blocks]


def test_markdown_blocks_have_their_kind_and_lines():
    """Lines that are off by one send a reader of the sources to the wrong place."""
    document = read_markdown(MARKDOWN.encode())
    assert document.title == "Hazelquay College"
    assert shapes(document) == [
        ("heading", "Hazelquay", (5, 5)),
        ("text", "First paragraph", (7, 8)),
        ("heading", "Fees", (10, 10)),
        ("table", "| item | fee |", (13, 16)),
        ("list", "- apply", (18, 22)),
        ("code", "```python", (24, 27)),
        ("heading", "Deep", (28, 28)),
        ("text", "Last line", (29, 29)),
    ]
    assert [block.level for block in document.blocks if block.kind == "heading"] == [1, 2, 3]
    lines = MARKDOWN.split("\n")
    for block in document.blocks:
        assert block.lines is not None
        assert block.text.split("\n")[0].strip() in lines[block.lines[0] - 1]
        assert block.text.split("\n")[-1].strip() in "\n".join(lines[block.lines[0] - 1 : block.lines[1]])
    table = next(block for block in document.blocks if block.kind == "table")
    assert table.header == "| item | fee |\n|------|-----|"


@pytest.mark.parametrize(
    "text", ["---\ntitle: never closed\n\ntext", "--- \n\n---\ntext", "---\ntext", "```\nnever closed\n# x", "# "]
)
def test_odd_markdown_loses_no_text(text):
    """Front matter that is not closed, or a fence, must not swallow the rest of a page."""
    document = read_markdown(text.encode())
    shown = " ".join(block.text for block in document.blocks)
    assert all(word in shown for word in text.replace("---", "").replace("#", "").split() if "title" not in word)


def test_line_numbers_are_those_of_an_editor():
    """A form feed or a Unicode line separator ends no line in an editor or in `sed`."""
    text = "one\x0ctwo\u2028three\x85four\r\n\r\nfive\rsix"
    assert read_text(text.encode()).blocks[1].lines == (3, 4)
    assert read_markdown(text.encode()).blocks[1].lines == (3, 4)


def test_plain_text_is_cut_at_empty_lines():
    """Markdown signs in a text file are text."""
    document = read_text(b"\n# one\ntwo\n\n\n- three\n")
    assert shapes(document) == [("text", "# one", (2, 3)), ("text", "- three", (6, 6))]


def test_html_keeps_what_a_reader_sees():
    """Scripts, styles, navigation and hidden templates are no text of the page."""
    page = b"""<html><head><title>Fees - Site</title><style>p{}</style></head><body>
    <nav>Home</nav><script>alert(1)</script><template>gone</template>
    <h1>Fees <i>2026</i></h1><div>one <b>bold</b> word<br>and<p>a paragraph</p>tail</div>
    <table><tr><th>item</th><th>fee</th></tr><tr><td>one</td><td>120</td></tr></table>
    <ul><li>a<li>b <a href=x>link</a></ul><pre>x =  1
y</pre></body></html>"""
    document = read_html(page)
    assert document.title == "Fees 2026"
    assert [(block.kind, block.text) for block in document.blocks] == [
        ("heading", "Fees 2026"),
        ("text", "one bold word and"),
        ("text", "a paragraph"),
        ("text", "tail"),
        ("table", "item | fee\none | 120"),
        ("list", "- a\n- b link"),
        ("code", "x =  1\ny"),
    ]
    assert next(block for block in document.blocks if block.kind == "table").header == "item | fee"


def test_nested_lists_and_tables_are_not_repeated():
    """`li` inside `li` would give every inner item twice, and a table in a table every inner row."""
    document = read_html(b"<ul><li>a<ul><li>b</li><li>c</li></ul></li><li>d</li></ul>")
    assert sorted(" ".join(block.text for block in document.blocks).replace("-", " ").split()) == ["a", "b", "c", "d"]
    table = b"<table><tr><td>x<table><tr><td>y</td></tr></table></td><td>z</td></tr></table>"
    assert sorted(" ".join(block.text for block in read_html(table).blocks).replace("|", " ").split()) == [
        "x",
        "y",
        "z",
    ]


@pytest.mark.parametrize("tag", ["div", "span", "b", "ul><li", "table><tr><td", "nav"])
def test_a_page_of_very_deeply_nested_elements_is_read(tag):
    """Recursion would end the process, and the parser takes minutes for 100,000 levels."""
    page = f"<{tag}>".encode() * (10_000 if "><" in tag else 100_000) + b"</nav>" * 200_000 + b"needle"
    assert "needle" in " ".join(block.text for block in read_html(page).blocks)


def test_words_are_not_cut_at_inline_elements():
    """`H<sub>2</sub>O` is one word; a search for it would find nothing."""
    assert read_html(b"<p>H<sub>2</sub>O is <b>wet</b>ter<br>than").blocks[0].text == "H2O is wetter than"


def test_a_page_in_a_form_or_a_layout_table_keeps_its_headings():
    """Some servers put every page into one form, and old pages are one table."""
    page = b"<form><table><tr><td><h2>Fees</h2><p>120</p></td></tr></table><button>Send</button></form>"
    assert [(block.kind, block.text) for block in read_html(page).blocks] == [("heading", "Fees"), ("text", "120")]


def test_an_old_page_is_read_in_the_encoding_that_it_names():
    """Most Chinese and Russian pages of the last century are not UTF-8."""
    page = '<meta charset="gb2312"><p>学费是一百二十元</p>'.encode("gb2312")
    assert read_html(page).blocks[0].text == "学费是一百二十元"
    assert read_html(b"<meta charset=nonsense><p>caf\xe9").blocks[0].text == "café"


def test_pdf_paragraphs_carry_their_page():
    """The page is the only place in a PDF file that a reader can look up."""
    document = read_pdf(pdf("First page\nof fees", "", "Third page", title="Fee list"))
    assert document.title == "Fee list"
    assert [(block.text, block.page) for block in document.blocks] == [("First page\nof fees", 1), ("Third page", 3)]
    assert document.notes == ["1 of 3 pages have no text (scanned?)"]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (pdf(""), "no_text"),
        (pdf("secret", password="x"), "encrypted"),
        (pdf("text")[:200], "broken"),
        (b"%PDF-1.7\n" + bytes(range(256)) * 20, "broken"),
        (b"no pdf at all", "broken"),
        (b"%PDF-1.4\ntrailer<</Root 1 0 R>>\n%%EOF", "broken"),
    ],
)
def test_a_pdf_without_readable_text_says_why(data, reason):
    """A scan, a password and a damaged file need different answers; none may end the command."""
    with pytest.raises(Unreadable) as caught:
        read_pdf(data)
    assert caught.value.reason == reason


def test_a_pdf_with_an_empty_user_password_is_read():
    """Such files open in every viewer; only changing them needs the owner's password."""
    import io

    import pypdf

    writer = pypdf.PdfWriter(io.BytesIO(pdf("open to all")))
    writer.encrypt("", owner_password="owner", algorithm="RC4-128")
    target = io.BytesIO()
    writer.write(target)
    assert read_pdf(target.getvalue()).blocks[0].text == "open to all"


def test_docx_keeps_headings_lists_and_tables_in_order():
    """Tables at the end, or merged cells twice, change what a passage says."""

    def build(document):
        document.add_heading("Fees", 0)
        document.add_paragraph("All fees are yearly.")
        document.add_heading("Refunds", 2)
        document.add_paragraph("one", style="List Bullet")
        document.add_paragraph("two", style="List Number")
        table = document.add_table(2, 2)
        for cell, text in zip([c for row in table.rows for c in row.cells], "abcd", strict=True):
            cell.text = text
        table.rows[0].cells[0].merge(table.rows[0].cells[1])
        document.add_paragraph("")
        document.add_paragraph("The end.")

    document = read_docx(docx(build))
    assert document.title == "Fees"
    assert [(block.kind, block.level, block.text) for block in document.blocks] == [
        ("heading", 1, "Fees"),
        ("text", 0, "All fees are yearly."),
        ("heading", 2, "Refunds"),
        ("list", 0, "- one\n- two"),
        ("table", 0, "a b\nc | d"),
        ("text", 0, "The end."),
    ]


@pytest.mark.parametrize(
    ("data", "reason"),
    [(b"PK\x03\x04 no zip", "broken"), (b"\xd0\xcf\x11\xe0" + bytes(600), "encrypted"), (b"text", "broken")],
)
def test_a_word_file_that_cannot_be_opened_says_why(data, reason):
    """Word puts a file with a password into another container."""
    with pytest.raises(Unreadable) as caught:
        read_docx(data)
    assert caught.value.reason == reason


def test_a_word_file_that_unpacks_to_an_absurd_size_is_refused(monkeypatch):
    """A zip bomb of some kilobytes would fill the memory."""
    import io
    import zipfile

    monkeypatch.setattr("tunewell.features.retrieval.readers.docx._MAX_UNPACKED_BYTES", 1 << 20)
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/document.xml", bytes(2 << 20))
    assert len(target.getvalue()) < 10_000
    with pytest.raises(Unreadable) as caught:
        read_docx(target.getvalue())
    assert caught.value.reason == "too_large"


def test_a_zip_file_that_is_no_word_file_is_broken():
    """An archive with the wrong name."""
    import io
    import zipfile

    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("a.txt", "text")
    with pytest.raises(Unreadable) as caught:
        read_docx(target.getvalue())
    assert caught.value.reason == "broken"


@pytest.mark.parametrize("comma", [",", ";", "\t", "|"])
def test_each_row_of_a_table_is_a_block_with_its_columns(comma):
    """Excel writes semicolons in half of Europe."""
    rows = [["college", "fee", ""], ["Hazelquay", '"1,5;0|"', "x"], ["", "", ""], ["Larkfell", '"two\nlines"', ""]]
    text = "\n".join(comma.join(row) for row in rows)
    blocks = read_csv(text.encode()).blocks
    assert [(block.text, block.lines) for block in blocks] == [
        ("college: Hazelquay\nfee: 1,5;0|\ncolumn 3: x", (2, 2)),
        ("college: Larkfell\nfee: two\nlines", (4, 5)),
    ]


def test_a_table_of_one_column_and_one_with_surplus_cells_are_read():
    """The sniffer finds no separator in one, and cells without a name in the other."""
    assert read_csv(b"question\nwhat, now\n").blocks[0].text.startswith("question: what")
    assert read_csv(b"a,b\n1,2,3\n").blocks[0].text == "a: 1\nb: 2\ncolumn 3: 3"


def test_json_lines_show_text_messages_and_fields():
    """Rows for training and rows of a table are both documents."""
    lines = [
        '{"text": "plain"}',
        '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}',
        "broken {",
        "",
        '{"fee": 120, "title": "Fees", "empty": "", "none": null}',
        '"a string"',
        "[1, 2]",
        "null",
        "[" * 100_000,
    ]
    document = read_json_lines("\n".join(lines).encode())
    assert [(block.text, block.lines) for block in document.blocks] == [
        ("plain", (1, 1)),
        ("user: hi\nassistant: ho", (2, 2)),
        ("title: Fees\nfee: 120", (5, 5)),
        ("a string", (6, 6)),
        ("[1, 2]", (7, 7)),
    ]
    assert len(document.notes) == 1
    with pytest.raises(Unreadable) as caught:
        read_json_lines(b"not json\nat all")
    assert caught.value.reason == "broken"


def test_a_json_file_is_one_document():
    """`.json` files are pretty-printed over many lines as often as not."""
    assert [block.text for block in read_json_lines(b'[{"text": "a"}, {"text": "b"}]').blocks] == ["a", "b"]
    pretty = b'{\n  "title": "Fees",\n  "text": "120"\n}'
    assert [block.text for block in read_json_lines(pretty).blocks] == ["title: Fees\n120"]


def test_a_number_that_json_cannot_hold_is_no_crash():
    """Python refuses integers of more than 4300 digits with a ValueError."""
    assert read_json_lines(b'{"text": "a"}\n' + b"9" * 5000).blocks[0].text == "a"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-16-le", "cp1252", "utf-32"])
def test_text_in_the_usual_encodings_is_read(encoding):
    """Windows still saves UTF-16 and its own code page."""
    marks = {"utf-16-be": b"\xfe\xff", "utf-16-le": b"\xff\xfe"}
    text, notes = decode(marks.get(encoding, b"") + "Gebühr für 120 €".encode(encoding))
    assert text == "Gebühr für 120 €"
    assert bool(notes) == (encoding == "cp1252")


@pytest.mark.parametrize(
    "data", [bytes(range(256)) * 4, b"\x89PNG\r\n\x1a\n" + bytes(64), b"\xff\xfe\x00\xd8\x00", b"a\x81"]
)
def test_binary_data_is_not_text(data):
    """A picture with the extension `.txt` would fill the index with noise."""
    with pytest.raises(Unreadable) as caught:
        decode(data)
    assert caught.value.reason == "not_text"


def test_blocks_are_plain_data():
    """Readers of other formats build them by hand."""
    assert TextBlock("text", "x").lines is None
