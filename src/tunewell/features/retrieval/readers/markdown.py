"""Read Markdown and plain text: headings, paragraphs, lists, tables and code, each with its lines."""

import re
from collections.abc import Iterator
from itertools import pairwise

from markdown_it import MarkdownIt

from tunewell.features.retrieval.readers.blocks import Kind, ParsedDocument, TextBlock, decode, split_lines

_KINDS: dict[str, Kind] = {
    **{"fence": "code", "code_block": "code", "table_open": "table"},
    **{"bullet_list_open": "list", "ordered_list_open": "list"},
}
_TITLE = re.compile(r"title:[ \t]*(['\"]?)(.+?)\1[ \t]*$", re.IGNORECASE)


def read_markdown(data: bytes) -> ParsedDocument:
    """Return the blocks of a Markdown file."""
    text, notes = decode(data)
    lines = split_lines(text)
    title, first = _front_matter(lines)
    document = ParsedDocument([block for block in _blocks(lines, first) if block.text], title, notes)
    document.title = title or document.first_heading
    return document


def read_text(data: bytes) -> ParsedDocument:
    """Return the paragraphs of a plain text file."""
    text, notes = decode(data)
    document, start = ParsedDocument(notes=notes), None
    lines = split_lines(text)
    for number, line in enumerate([*lines, ""], 1):
        if line.strip():
            start = start or number
        elif start is not None:
            span = (start, number - 1)
            document.blocks.append(TextBlock("text", "\n".join(lines[start - 1 : number - 1]).strip(), lines=span))
            start = None
    return document


def _front_matter(lines: list[str]) -> tuple[str | None, int]:
    """Return the title in the YAML header of a page, and the index of the first line after it."""
    if lines and lines[0].strip() == "---":
        for end, line in enumerate(lines[1:200], 1):
            if line.strip() in ("---", "..."):
                titles = (found[2] for inner in lines[1:end] if (found := _TITLE.match(inner)))
                return next(titles, None), end + 1
    return None, 0


def _blocks(lines: list[str], first: int) -> Iterator[TextBlock]:
    """Yield the outermost blocks, with their Markdown as it is written. Inline markup is not parsed."""
    parser = MarkdownIt("commonmark").enable("table")
    parser.core.ruler.enableOnly(["normalize", "block"])
    tokens, done = parser.parse("\n".join(lines[first:])), first
    for token, following in pairwise([*tokens, None]):
        if token is None or token.level or token.map is None:
            continue
        begin, end = (first + line for line in token.map)
        yield from _block("text", lines, done, begin)  # a definition of a link is no block
        done = end
        if token.type == "heading_open" and following is not None:
            yield TextBlock("heading", " ".join(following.content.split()), int(token.tag[1:]), (begin + 1, begin + 1))
        elif token.type != "hr":
            yield from _block(_KINDS.get(token.type, "text"), lines, begin, end)
    yield from _block("text", lines, done, len(lines))


def _block(kind: Kind, lines: list[str], begin: int, end: int) -> Iterator[TextBlock]:
    """Yield the lines from `begin` to `end` as a block, if there is any text in them."""
    while end > begin and not lines[end - 1].strip():
        end -= 1
    if text := "\n".join(lines[begin:end]).strip("\n").rstrip():
        header = "\n".join(lines[begin : begin + 2]) if kind == "table" else ""
        yield TextBlock(kind, text, lines=(begin + 1, end), header=header)
