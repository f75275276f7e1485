"""The page of a report in a real browser. Needs Chromium on the PATH, and fails, not skips, where there is none."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Page, address_of, chromium
from hostile_texts import PAYLOADS
from sample_reports import SAMPLES, report_of_everything, with_text

from tunewell.evaluation.comparison import column_of, compare_columns
from tunewell.evaluation.report.page import report_page
from tunewell.records.report import Report
from tunewell.runs.loss_curve import Line

pytestmark = [pytest.mark.slow, pytest.mark.browser]

_OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
_OPEN_ALL = "document.querySelectorAll('details').forEach(each => { each.open = true })"
_SHOWN = "document.querySelector('#plan details table').checkVisibility()"
_COLOUR = "getComputedStyle(document.body).backgroundColor"
_SETTLE_SECONDS = 1.0


class Listener:
    """A server that writes down who calls, and says nothing."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.host = f"127.0.0.1:{self.socket.getsockname()[1]}"
        self.calls: list[bytes] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                caller, _ = self.socket.accept()
            except OSError:
                return
            with caller:
                caller.settimeout(2)
                try:
                    self.calls.append(caller.recv(200))
                except OSError:
                    self.calls.append(b"")


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    """One page of one browser, for all tests of this file."""
    with chromium() as page:
        yield page


@pytest.fixture
def listener() -> Iterator[Listener]:
    """A server of its own for each test."""
    listener = Listener()
    yield listener
    listener.socket.close()


def _written(folder: Path, html: str) -> str:
    path = folder / "report.html"
    path.write_text(html, encoding="utf-8")
    return address_of(path)


def _hostile(listener: Listener) -> Report:
    """A report with every payload in every text."""
    return with_text(report_of_everything(), " ".join(PAYLOADS).replace("HOST", listener.host))


def _asked(page: Page, since: int) -> list[str]:
    """List what was asked for after a moment, but for the page itself and what it carries within."""
    events = [event["params"] for event in page.events[since:] if event["method"] == "Network.requestWillBeSent"]
    addresses = [event["request"]["url"] for event in events]
    return [address for address in addresses if not address.startswith(("file:", "data:"))]


def test_this_would_notice_a_page_that_runs_what_it_shows(browser, listener, tmp_path):
    """The other tests mean something only if an unescaped payload is seen here."""
    since = len(browser.events)
    payloads = " ".join(PAYLOADS[:6]).replace("HOST", listener.host)
    browser.open(_written(tmp_path, f"<!DOCTYPE html><title>plain</title><body>{payloads}"))
    browser.wait(_SETTLE_SECONDS)
    methods = [event["method"] for event in browser.events[since:]]
    assert "Page.javascriptDialogOpening" in methods and browser.value_of("document.title") == "owned"
    assert _asked(browser, since) and listener.calls


def test_payloads_in_every_text_do_nothing(browser, listener, tmp_path):
    """No dialog, no script, no request, no other title, nothing that the policy had to stop."""
    since = len(browser.events)
    report = _hostile(listener)
    browser.open(_written(tmp_path, report_page(report)))
    browser.value_of(_OPEN_ALL)
    browser.wait(_SETTLE_SECONDS)
    methods = {event["method"] for event in browser.events[since:]}
    assert not methods & {"Page.javascriptDialogOpening", "Runtime.exceptionThrown", "Log.entryAdded"}
    assert browser.value_of("document.title").startswith(f"{report.verdict}: <script>")
    assert browser.value_of("document.querySelectorAll('script, iframe, img, object, embed, form, base').length") == 0
    assert _asked(browser, since) == [] and listener.calls == []


def test_a_comparison_of_runs_runs_nothing_and_fits_the_screen(browser, listener, tmp_path):
    """Names and settings of runs are shown too, and a table of many runs is wider than a phone."""
    from tunewell.features.compare.page import comparison_page

    text = " ".join(PAYLOADS).replace("HOST", listener.host)
    columns = []
    for number, report in enumerate((_hostile(listener), report_of_everything(), report_of_everything())):
        line = Line(f"{text} {number}", [(0, 2.0), (5, 1.9), (9, 1.0 + number)])
        columns.append(column_of(report, f"{text} {number}", settings={"seed": number, text: number}, line=line))
    html = comparison_page(compare_columns(columns, [text]))
    since = len(browser.events)
    browser.open(_written(tmp_path, html), width=360)
    browser.value_of(_OPEN_ALL)
    browser.wait(_SETTLE_SECONDS)
    assert browser.value_of("document.title").endswith("(tunewell comparison)")
    assert listener.calls == [] and _asked(browser, since) == []
    assert browser.value_of(_OVERFLOW) <= 0
    assert browser.value_of("document.querySelectorAll('figure svg path').length") > 3


def test_the_policy_alone_stops_what_is_not_escaped(browser, listener, tmp_path):
    """The second wall: payloads as elements of the page, under its policy. A refresh is no matter of the policy."""
    since = len(browser.events)
    raw = " ".join(payload for payload in PAYLOADS if "refresh" not in payload).replace("HOST", listener.host)
    html = report_page(SAMPLES["minimal"]())
    spoiled = html.replace("</main>", raw.encode("utf-8", "replace").decode() + "</main>")
    browser.open(_written(tmp_path, spoiled))
    browser.wait(_SETTLE_SECONDS)
    methods = {event["method"] for event in browser.events[since:]}
    assert "Page.javascriptDialogOpening" not in methods and browser.value_of("document.title") != "owned"
    assert "Log.entryAdded" in methods, "the browser says what it refused"
    assert listener.calls == []


@pytest.mark.parametrize("width", [360, 768, 1280])
@pytest.mark.parametrize("name", [*SAMPLES, "unbroken", "hostile"])
def test_nothing_is_wider_than_the_screen(browser, listener, tmp_path, name, width):
    """A page that moves sideways on a phone is not read to its end."""
    long = with_text(report_of_everything(), "W" * 10_000)
    reports = {"unbroken": long, "hostile": _hostile(listener)}
    browser.open(_written(tmp_path, report_page(reports.get(name) or SAMPLES[name]())), width=width, height=800)
    assert browser.value_of(_OVERFLOW) == 0
    browser.value_of(_OPEN_ALL)
    assert browser.value_of(_OVERFLOW) == 0 and browser.value_of("innerWidth") == width


def test_the_style_is_allowed_and_follows_the_colour_scheme(browser, tmp_path):
    """A hash that does not fit would leave a page without any style, and no test of the text would see it."""
    address = _written(tmp_path, report_page(SAMPLES["pass"]()))
    colours = {}
    for scheme in ("light", "dark"):
        browser.open(address, scheme=scheme)
        colours[scheme] = browser.value_of(_COLOUR)
    assert colours == {"light": "rgb(251, 251, 249)", "dark": "rgb(20, 23, 26)"}


def test_a_printed_page_is_light_and_has_its_folds_open(browser, tmp_path):
    """Paper cannot be clicked, and ink is dear."""
    browser.open(_written(tmp_path, report_page(SAMPLES["pass"]())), scheme="dark")
    assert browser.value_of(_SHOWN) is False
    browser.dress(media="print", scheme="dark")
    assert browser.value_of(_SHOWN) is True and browser.value_of(_COLOUR) == "rgb(255, 255, 255)"
    shown = "Array.from(document.querySelectorAll('.exchange')).filter(each => each.checkVisibility())"
    assert browser.value_of(f"{shown}.length") == len(SAMPLES["pass"]().exchanges)


def test_folds_can_be_reached_and_opened_by_keyboard(browser, tmp_path):
    """Not everyone has a mouse."""
    browser.open(_written(tmp_path, report_page(SAMPLES["pass"]())))
    browser.value_of("document.querySelector('#plan summary').focus()")
    for kind in ("keyDown", "keyUp"):
        browser.ask("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r")
    assert browser.value_of("document.activeElement.tagName") == "SUMMARY" and browser.value_of(_SHOWN) is True
