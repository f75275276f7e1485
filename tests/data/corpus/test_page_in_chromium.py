"""The page of `inspect --html` in a real browser. Needs Chromium on the PATH, and fails, not skips, without it."""

from pathlib import Path

import pytest
from chromium import address_of, chromium
from hostile_texts import PAYLOADS
from test_page import dirty_rows, page_of
from tests.corpora import prepare_in, write_rows

pytestmark = [pytest.mark.slow, pytest.mark.browser]

_OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
_SHOWN = "Array.from(document.querySelectorAll('.row')).filter(row => row.checkVisibility())"
_SETTLE_SECONDS = 1.0


@pytest.fixture(scope="module")
def browser():
    """One page of one browser, for all tests of this file."""
    with chromium() as page:
        yield page


@pytest.fixture
def address(tmp_path, monkeypatch, tiny_model):
    """The address of a page with hostile rows and a word that does not break."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", dirty_rows([*PAYLOADS, "W" * 5000]))
    prepare_in(tmp_path, tiny_model, Path("rows.jsonl"), "data.held_out=0.2")
    page_of(tmp_path)
    return address_of(tmp_path / "page.html")


def _search(browser, text):
    """Type into the search box, as a person would."""
    browser.value_of("document.getElementById('search').value = ''; document.getElementById('search').focus()")
    browser.ask("Input.insertText", text=text)
    return browser.value_of(f"{_SHOWN}.map(row => row.innerText.replaceAll('↵', ''))")


def test_hostile_rows_do_nothing(browser, address):
    """No dialog, no request, no other title, nothing that the policy had to stop."""
    since = len(browser.events)
    browser.open(address)
    browser.value_of("document.querySelectorAll('details').forEach(each => { each.open = true })")
    browser.wait(_SETTLE_SECONDS)
    events = browser.events[since:]
    methods = {event["method"] for event in events}
    assert not methods & {"Page.javascriptDialogOpening", "Runtime.exceptionThrown", "Log.entryAdded"}
    assert browser.value_of("document.title") == "corpus (tunewell corpus)"
    asked = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []


def test_the_search_box_filters_the_rows(browser, address):
    """Guards the script: its hash must fit the policy, and text over several tokens and letters must be found."""
    browser.open(address)
    assert browser.value_of(f"{_SHOWN}.length") == 20
    browser.value_of("document.getElementById('more').click()")
    assert browser.value_of(f"{_SHOWN}.length") == 40
    found = _search(browser, "IT IS 東京 7.")
    assert len(found) == 1 and "It is 東京 7." in found[0]
    assert browser.value_of("CSS.highlights.get('found').size") == 1
    assert browser.value_of("document.getElementById('found').textContent").startswith("1 of ")
    assert _search(browser, "no row has this") == []
    assert len(_search(browser, "</script><script>alert(1)")) >= 1
    _search(browser, "it is")
    choose = "const s = document.getElementById('split'); s.value = 'held-out'; s.dispatchEvent(new Event('change'))"
    browser.value_of(choose)
    held_out = browser.value_of(f"{_SHOWN}.map(row => row.innerText)")
    assert held_out and all("held out" in text.splitlines()[0] for text in held_out)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 768, 1280])
def test_nothing_is_wider_than_the_screen(browser, address, width, scheme):
    """A page that moves sideways on a phone is not read to its end."""
    browser.open(address, width=width, height=800, scheme=scheme)
    assert browser.value_of(_OVERFLOW) == 0
    colour = browser.value_of("getComputedStyle(document.body).backgroundColor")
    assert colour == {"light": "rgb(251, 251, 249)", "dark": "rgb(20, 23, 26)"}[scheme]


def test_a_printed_page_is_light_and_keeps_the_colours_of_the_masks(browser, address):
    """Paper without colours would not show what is supervised."""
    browser.open(address, scheme="dark")
    browser.dress(media="print", scheme="dark")
    assert browser.value_of("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.value_of("getComputedStyle(document.querySelector('mark')).printColorAdjust") == "exact"
    assert browser.value_of("document.getElementById('search').checkVisibility()") is False
