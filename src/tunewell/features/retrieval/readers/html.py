"""Read HTML pages: visible text with headings, lists and tables. Scripts, styles and navigation are left out."""

import re
from collections.abc import Iterator
from typing import Any

from tunewell.core.optional import import_optional
from tunewell.features.retrieval.readers.blocks import ParsedDocument, TextBlock, decode

_LEFT_OUT = re.compile(
    "-comment|head|script|style|noscript|template|svg|nav|iframe|object|button|select|textarea|datalist"
)
_HEADINGS = {f"h{level}": level for level in range(1, 7)}
_LISTS = ("ul", "ol", "dl")
_ITEMS = ("li", "dt", "dd")
_INLINE = re.compile(
    "a|abbr|b|bdi|bdo|cite|code|data|dfn|em|i|img|kbd|label|mark|q|rp|rt|ruby|s|samp|small|span|strong|su[bp]|"
    "time|u|var|wbr"
)
_CHARSET = re.compile(rb"charset\s*=\s*[\"']?([\w.:-]{1,40})", re.IGNORECASE)
_HEAD_BYTES = 4096
_TAG = re.compile(r"<(/?)([A-Za-z][A-Za-z0-9]*)[^<>]*>")
_NOT_NESTED = re.compile(
    "area|base|br|col|embed|hr|img|input|link|meta|param|source|track|wbr|li|d[td]|p|t[dhr]|tbody|thead|tfoot|option",
    re.IGNORECASE,
)
"""Elements without an end tag, or whose end tag is often left out."""
_MAX_NESTING = 500
"""Browsers stop nesting at 512. The time of the parser grows with the square of the depth: 100,000 take minutes."""


def read_html(data: bytes) -> ParsedDocument:
    """Return the blocks of an HTML page."""
    parser = import_optional("selectolax.lexbor", extra="retrieval", purpose="reading HTML")
    declared = _CHARSET.search(data[:_HEAD_BYTES])
    text, notes = decode(data, declared=declared[1].decode("ascii") if declared else None)
    page = parser.LexborHTMLParser(_limit_nesting(text))
    title = page.css_first("title")
    document = ParsedDocument(title=_words(title) if title else None, notes=notes)
    body = page.body or page.root
    if body is not None:
        document.blocks = _Walk(_layout_tables(page)).blocks(body)
    document.title = document.first_heading or document.title or None
    return document


def _limit_nesting(text: str) -> str:
    """Remove the tags of elements that are nested too deeply; their text stays."""
    if text.count("<") <= _MAX_NESTING:
        return text
    depth = 0

    def kept(tag: re.Match[str]) -> str:
        nonlocal depth
        if _NOT_NESTED.fullmatch(tag[2]):
            return tag[0]
        depth += 0 if tag[1] else 1
        is_kept = depth <= _MAX_NESTING
        depth = max(0, depth - 1) if tag[1] else depth
        return tag[0] if is_kept else " "

    return _TAG.sub(kept, text)


class _Walk:
    """Collects the blocks of a page. A stack instead of recursion: pages can be nested very deeply."""

    def __init__(self, layout_tables: set[int]) -> None:
        self._layout_tables = layout_tables
        self._blocks: list[TextBlock] = []
        self._inline: list[str] = []
        self._items: list[str] = []
        self._lists = 0
        """Number of lists around the current node."""
        self._is_new_item = False

    def blocks(self, root: Any) -> list[TextBlock]:
        stack: list[Any] = [root]
        while stack:
            node = stack.pop()
            if isinstance(node, str):
                self._leave(node)
                continue
            tag = _tag(node)
            if tag == "-text":
                self._inline.append(node.text_content or "")
            elif tag == "br":
                self._inline.append(" ")
            elif _LEFT_OUT.fullmatch(tag):
                continue
            elif tag in _HEADINGS and not self._lists:
                self._flush()
                if text := _words(node):
                    self._blocks.append(TextBlock("heading", text, _HEADINGS[tag]))
            elif tag == "pre" or (tag == "table" and node.mem_id not in self._layout_tables):
                self._flush()
                self._end_list()
                block = _table(node) if tag == "table" else TextBlock("code", "".join(_texts(node)).strip("\n"))
                if block.text:
                    self._blocks.append(block)
            else:
                if not _INLINE.fullmatch(tag):
                    self._flush()
                    self._lists += tag in _LISTS
                    self._is_new_item = tag in _ITEMS or self._is_new_item
                    stack.append(tag)
                stack.extend(reversed(list(node.iter(include_text=True))))
        self._flush()
        self._end_list()
        return self._blocks

    def _leave(self, tag: str) -> None:
        self._flush()
        self._lists -= tag in _LISTS
        if not self._lists:
            self._end_list()

    def _flush(self) -> None:
        """End a paragraph, or a line of a list."""
        text = " ".join("".join(self._inline).split())
        self._inline.clear()
        if text and self._lists:
            self._items.append(f"- {text}" if self._is_new_item else f"  {text}")
            self._is_new_item = False
        elif text:
            self._blocks.append(TextBlock("text", text))

    def _end_list(self) -> None:
        if self._items:
            self._blocks.append(TextBlock("list", "\n".join(self._items)))
            self._items = []


def _layout_tables(page: Any) -> set[int]:
    """Return the elements around headings and other tables: a table among them arranges the page, and has no data."""
    around: set[int] = set()
    for node in page.css("table, h1, h2, h3, h4, h5, h6"):
        parent = node.parent
        while parent is not None and parent.mem_id not in around:
            around.add(parent.mem_id)
            parent = parent.parent
    return around


def _tag(node: Any) -> str:
    """Return the name of a tag. A processing instruction such as `<?x>` has none."""
    return node.tag or "-unknown"


def _texts(root: Any) -> Iterator[str]:
    stack = [root]
    while stack:
        node = stack.pop()
        if _tag(node) == "-text":
            yield node.text_content or ""
        elif not _LEFT_OUT.fullmatch(_tag(node)) or node is root:
            if not _INLINE.fullmatch(_tag(node)) and node is not root:
                yield "\n"
            stack.extend(reversed(list(node.iter(include_text=True))))


def _words(node: Any) -> str:
    return " ".join("".join(_texts(node)).split())


def _table(node: Any) -> TextBlock:
    rows = [[_words(cell) for cell in row.css("th, td")] for row in node.css("tr")]
    lines = [" | ".join(row) for row in rows if any(row)]
    is_headed = bool(node.css("th")) and len(lines) > 1
    return TextBlock("table", "\n".join(lines), header=lines[0] if is_headed else "")
