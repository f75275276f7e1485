"""Build self-contained HTML pages: a shared layout and style, and text with its invisible characters made visible.

A content security policy allows only the page's own style sheet and script, by their hashes, so the texts on a page
cannot run or load anything.
"""

import base64
import hashlib
import json
import re
import shlex
from collections.abc import Iterable
from functools import cache, partial
from importlib.resources import files
from importlib.resources.abc import Traversable

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup, escape

from tunewell.core.units import count, date, duration, percent, size_bytes

EMPTY = "(empty)"
CODE = re.compile("`([^`]*)`")
"""Code in a sentence; `split` returns text and code alternately."""
_TRAIN_AGAIN = re.compile("`tunewell train --config ([^`]* --out [^`]*)`")
_MAX_CHARS = 20_000
"""Maximum number of characters of one text, to limit the size of the page."""
_LONG_CHARS, _LONG_LINES = 500, 8
"""Longer texts get a scroll box, which must be reachable by keyboard."""

# The zero-width joiners (200C, 200D) are not replaced, because Persian, Indic scripts and emoji need them.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u115f\u1160\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff"
    "\ufff0-\ufffb\ufffe\uffff\ufdd0-\ufdef\ud800-\udfff\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)


def result_table(rows: Iterable[tuple[str, object]]) -> str:
    """Return a table of names and values, for the view of a result in a notebook."""
    row = Markup("<tr><th>{}</th><td>{}</td></tr>")
    return f"<table style='text-align:left'>{Markup('').join(row.format(*own) for own in rows)}</table>"


def visible(value: object) -> str:
    """Return a text with invisible characters as code points, truncated to 20,000 characters.

    visible("a\\x00b") = a[U+0000]b       visible("a\\u202eb") = a[U+202E]b       visible("\\ud800") = [U+D800]
    """
    text = str(value)
    shown = _UNSEEN.sub(lambda match: f"[U+{ord(match[0]):04X}]", text[:_MAX_CHARS])
    left = len(text) - _MAX_CHARS
    return shown if left <= 0 else f"{shown}\n[{count(left, 'more character')}]"


def single_line(value: object) -> str:
    """Return the result of `visible` on one line, with white space collapsed."""
    return " ".join(visible(value).split())


def in_python(text: str) -> str:
    """Return a sentence with its commands to train again as calls of the library, for a notebook.

    in_python("`tunewell train --config c.yaml --out b --set seed=1`") =
        "`tunewell.train('c.yaml', out='b', sets=['seed=1'])`"
    """

    def call(found: re.Match[str]) -> str:
        words = shlex.split(found[1])
        return f"`tunewell.train({words[0]!r}, out={words[2]!r}, sets={words[4::2]})`"

    return _TRAIN_AGAIN.sub(call, text)


def prose(text: str) -> Markup:
    """Return a sentence as HTML, with parts between backticks as code."""
    code, parts = Markup("<code>{}</code>"), enumerate(CODE.split(visible(text)))
    return Markup("").join(code.format(part) if index % 2 else escape(part) for index, part in parts)


def _text_or_empty(text: str) -> str:
    if text.strip():
        return visible(text)
    return f"{EMPTY}, {count(len(text), 'blank character')}" if text else EMPTY


def _is_long(text: str) -> bool:
    return len(text) > _LONG_CHARS or text.count("\n") > _LONG_LINES


def render(package: str, template: str, **values: object) -> str:
    """Return a template of a package with these values, for example the view of a result in a notebook."""
    return page_environment(package).get_template(template).render(values)


@cache
def page_environment(package: str) -> Environment:
    """Return the environment of a package with templates in its folder `page`; they may extend `layout.html`.

    Values are escaped in `.html` files only.
    """
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package, "page"), PackageLoader("tunewell.core", "pages")]),
        autoescape=select_autoescape(),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(  # pyright: ignore[reportUnknownMemberType]  jinja2 does not type it
        visible=visible,
        line=single_line,
        prose=prose,
        in_python=in_python,
        answer_text=_text_or_empty,
        is_long=_is_long,
        count=count,
        date=date,
        share=percent,
        duration=duration,
        size_bytes=size_bytes,
        json=partial(json.dumps, ensure_ascii=False),
    )
    environment.globals["own"] = _own_texts(package)  # pyright: ignore[reportUnknownMemberType]
    return environment


def _own_texts(package: str) -> dict[str, Markup]:
    """Return the style sheet and the script of a package's page, and their hashes for the policy."""
    folder = files(package) / "page"
    base = _read(files("tunewell.core") / "pages" / "base.css")
    names = sorted(file.name for file in folder.iterdir())
    style = "\n" + base + "".join(_read(folder / name) for name in names if name.endswith(".css"))
    script = "".join(_read(folder / name) for name in names if name.endswith(".js"))
    texts = {"style": style, "style_hash": _hash(style), "script": script, "script_hash": _hash(script)}
    return {name: Markup(text) for name, text in texts.items()}


def _read(file: Traversable) -> str:
    return file.read_text(encoding="utf-8").replace("\r\n", "\n")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
