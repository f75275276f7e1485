"""What a browser would make of an HTML page, for tests of the pages that tunewell writes."""

from html.parser import HTMLParser

_VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """What a browser would make of a page: its elements, the text of each, and its style."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, tuple[tuple[str, str | None], ...]]] = []
        self.declarations: list[str] = []
        self.text = self.style = self.script = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == [], "every element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, tuple(attrs)))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, tuple(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "style":
            self.style += data
        elif self._open and self._open[-1] == "script":
            self.script += data
        else:
            self.text += data

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")

    def handle_decl(self, decl: str) -> None:
        self.declarations.append(decl)

    def attributes(self, name: str) -> list[str]:
        """List the values of one attribute, wherever it is."""
        return [value or "" for _, attributes in self.elements for key, value in attributes if key == name]
