"""The files of the page: the vendored one is what it says, and nothing is inline, evaluated or from elsewhere."""

import hashlib
import json
import re
from pathlib import Path

import tunewell.features.watch

_STATIC = Path(tunewell.features.watch.__file__).with_name("static")
_VENDORED = _STATIC / "vendor"
_WEB = Path(__file__).with_name("web")
_NAMESPACES = "http://www.w3.org/"


def _record():
    return json.loads((_VENDORED / "vendor.json").read_text(encoding="utf-8"))


def test_the_vendored_files_are_those_that_were_built():
    """A file that was changed by hand would not be the library that its record names."""
    found = {name: hashlib.sha256((_VENDORED / name).read_bytes()).hexdigest() for name in _record()["sha256"]}
    assert found == _record()["sha256"]


def test_the_vendored_libraries_are_those_of_the_lock_file():
    """`make vendor` would build other versions than the ones that are shown."""
    lock = json.loads((_WEB / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    for own in _record()["packages"]:
        locked = lock[f"node_modules/{own['name']}"]
        assert (own["version"], own["integrity"]) == (locked["version"], locked["integrity"])
    licences = (_VENDORED / "LICENSES.txt").read_text(encoding="utf-8")
    assert all(f"{own['name']} {own['version']}" in licences for own in _record()["packages"])


def test_nothing_is_evaluated_inline_or_fetched_from_another_host():
    """The policy would stop it, and a host would learn who reads what."""
    for path in [*_STATIC.glob("*.*"), _VENDORED / "vendor.js", _VENDORED / "uplot.css"]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"\beval\(|new Function|\.innerHTML\s*=[^=]|insertAdjacentHTML|document\.write", text) or (
            path.name == "vendor.js"  # Preact's dangerouslySetInnerHTML, which the page does not use
        )
        addresses = re.findall(r"https?://[^\s\"'`]+", text)
        assert [own for own in addresses if not own.startswith(_NAMESPACES)] == [], path.name
    own = "".join(path.read_text(encoding="utf-8") for path in _STATIC.glob("*.js"))
    assert "dangerouslySetInnerHTML" not in own
    page = (_STATIC / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<style|\bstyle=|\bon\w+=|<script(?! type=\"module\" src=\"main.js\")", page)


def test_the_page_stays_small():
    """What one person can read: 2,800 lines, as prettier formats them."""
    lines = sum(
        len(path.read_text(encoding="utf-8").splitlines()) for path in [*_STATIC.glob("*.js"), *_STATIC.glob("*.css")]
    )
    assert lines <= 2800
