"""Read Markdown and plain text: headings, paragraphs, lists, tables and code, each with its lines."""

import re

from tunewell.features.retrieval.readers.blocks import Block, Kind, ParsedDocument, decode, split_lines

_HEADING = re.compile(r" {0,3}(#{1,6})[ \t]+(.*?)[ \t#]*$")
_UNDERLINE = re.compile(r" {0,3}(=+|-{2,})[ \t]*$")
_ITEM = re.compile(r"[ \t]*([-*+•]|\d{1,9}[.)])[ \t]+\S")
_FENCE = re.compile(r" {0,3}(```+|~~~+)")
_RULE = re.compile(r" {0,3}([-*_][ \t]*){3,}$")
_TITLE = re.compile(r"title:[ \t]*(['\"]?)(.+?)\1[ \t]*$", re.IGNORECASE)


def read_markdown(data: bytes) -> ParsedDocument:
    """Return the blocks of a Markdown file."""
    text, notes = decode(data)
    lines = split_lines(text)
    title, first = _front_matter(lines)
    document = ParsedDocument(_Parser(lines, first).blocks(), title, notes)
    document.title = title or next((block.text for block in document.blocks if block.level == 1), None)
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
            document.blocks.append(Block("text", "\n".join(lines[start - 1 : number - 1]).strip(), lines=span))
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


class _Parser:
    def __init__(self, lines: list[str], first: int) -> None:
        self._lines = lines
        self._at = first
        self._blocks: list[Block] = []

    def blocks(self) -> list[Block]:
        while self._at < len(self._lines):
            line = self._lines[self._at]
            if not line.strip() or _RULE.match(line):
                self._at += 1
            elif found := _HEADING.match(line):
                self._heading(found[2], len(found[1]), 1)
            elif fence := _FENCE.match(line):
                self._take("code", self._fence_end(fence[1]))
            elif self._is_table():
                self._take("table", self._end(lambda line: "|" in line), header=2)
            elif _ITEM.match(line):
                self._take("list", self._list_end())
            else:
                self._paragraph()
        return [block for block in self._blocks if block.text]

    def _paragraph(self) -> None:
        end = self._at + 1
        while end < len(self._lines) and not self._is_break(end):
            if underline := _UNDERLINE.match(self._lines[end]):
                self._heading(
                    " ".join(self._lines[self._at : end]).strip(), 1 if underline[1][0] == "=" else 2, end + 1
                )
                self._at = end + 1
                return
            end += 1
        self._take("text", end)

    def _is_break(self, index: int) -> bool:
        line = self._lines[index]
        return not line.strip() or any(pattern.match(line) for pattern in (_HEADING, _FENCE, _ITEM))

    def _is_table(self) -> bool:
        following = self._lines[self._at + 1 : self._at + 2]
        return "|" in self._lines[self._at] and bool(following) and set(following[0].strip()) <= set("|-: ") != set()

    def _list_end(self) -> int:
        """Return the end of a list: its items, their continuation lines, and indented paragraphs."""
        end = self._at + 1
        while end < len(self._lines):
            line = self._lines[end]
            is_blank = not line.strip()
            following = self._lines[end + 1] if end + 1 < len(self._lines) else ""
            if is_blank and not (_ITEM.match(following) or following.startswith((" ", "\t"))):
                break
            if not is_blank and (_HEADING.match(line) or _FENCE.match(line)):
                break
            end += 1
        return end

    def _fence_end(self, mark: str) -> int:
        for end in range(self._at + 1, len(self._lines)):
            if self._lines[end].strip().startswith(mark):
                return end + 1
        return len(self._lines)

    def _end(self, holds) -> int:  # type: ignore[no-untyped-def]
        end = self._at
        while end < len(self._lines) and holds(self._lines[end]):
            end += 1
        return end

    def _heading(self, text: str, level: int, end: int) -> None:
        self._blocks.append(Block("heading", text.strip(), level, (self._at + 1, self._at + 1)))
        self._at = self._at + 1 if end == 1 else end

    def _take(self, kind: Kind, end: int, *, header: int = 0) -> None:
        lines = self._lines[self._at : end]
        text = "\n".join(lines).strip("\n").rstrip()
        head = "\n".join(lines[:header])
        self._blocks.append(Block(kind, text, lines=(self._at + 1, end), header=head))
        self._at = end
