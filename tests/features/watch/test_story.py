"""The story of the page: from a dropped file to a verdict, a chat and a proven export, by clicks or by keyboard alone.

`TUNEWELL_SHOTS=FOLDER` keeps a picture of each screen. `make watch-story` runs this file.
"""

import os
import re
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Page, expect
from story import (
    button,
    choose,
    chromium,
    click,
    drop,
    events_of,
    german_rows,
    has_axe,
    open_page,
    serious_faults,
    wait_until,
    watched,
    write_college,
    write_model,
)

pytestmark = [pytest.mark.slow, pytest.mark.browser]

_EPOCHS = "150"
"""Long enough to be stopped half way."""


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """The address of a page for a folder with nothing but a small model."""
    folder = tmp_path_factory.mktemp("watched")
    write_model(folder / "models" / "tiny")
    with watched(folder) as url:
        yield url, folder


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


class Screens:
    """Looks at each screen: a picture, nothing wider than the page, nothing serious for axe-core."""

    def __init__(self, page: Page, name: str) -> None:
        self.page, self.name, self.faults = page, name, list[str]()

    def see(self, screen: str) -> None:
        wide = self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        if wide > 0:
            self.faults.append(f"{screen}: {wide} pixels wider than the page")
        self.faults += [f"{screen}: {fault}" for fault in serious_faults(self.page)]
        if folder := os.environ.get("TUNEWELL_SHOTS"):
            self.page.screenshot(path=Path(folder) / f"{self.name}-{screen}.png", full_page=True)


def _context(browser, width: int, scheme: str) -> BrowserContext:
    size = {"width": width, "height": 900}
    return browser.new_context(viewport=size, color_scheme=scheme, has_touch=width < 500, reduced_motion="reduce")


def test_a_german_table_becomes_a_proven_model_by_clicking_alone(browser, address):
    """A step without a click, a number that is not the record's, a foreign request or an error ends the story."""
    url, folder = address
    page, watcher = open_page(_context(browser, 1280, "light"), url)
    screens = Screens(page, "desktop")
    screens.see("home-empty")
    page.get_by_role("link", name="Choose your rows").click()
    expect(page.locator(".drop")).to_be_visible()
    screens.see("new")

    drop(page, "Fragen.csv", german_rows())
    expect(page.get_by_role("heading", level=1)).to_contain_text("In which line are all letters right?")
    screens.see("encoding")
    choose(page, "Was kostet die Käsereibe?")
    expect(page.get_by_role("heading", level=1)).to_contain_text("is the question?")
    choose(page, "Anliegen des Kunden")
    expect(page.get_by_role("heading", level=1)).to_contain_text("is the answer?")
    screens.see("column")
    choose(page, "Unser Text")
    expect(page.get_by_role("heading", level=1)).to_have_text("32 rows will be read like this")
    screens.see("read")
    page.go_back()
    expect(page.get_by_role("heading", level=1)).to_contain_text("is the answer?")
    choose(page, "Unser Text")
    click(page, "This is right")

    _use_tiny_model(page, screens)
    _change_epochs(page)
    screens.see("plan")
    shown = page.locator("details", has_text="The file that is written").locator("pre").text_content()
    click(page, "Start training")

    run = folder / "Fragen" / "run"
    expect(page.get_by_role("navigation")).to_be_visible()
    run = wait_until(lambda: next(folder.glob("*/run/events.jsonl"), None), "the run has begun").parent
    assert (run.parent / "tunewell.yaml").read_text(encoding="utf-8") == shown
    expect(page.locator(".canvas canvas")).to_be_visible()
    expect(page.get_by_text("untrained", exact=True).first).to_be_visible()
    screens.see("running")

    click(page, "Stop and save")
    expect(page.locator(".status.interrupted")).to_be_visible()
    stopped = len(events_of(run))
    expect(page.locator("[data-field=steps]")).to_have_text(str(stopped))
    screens.see("stopped")
    page.get_by_role("button", name="Resume").click()
    expect(page.locator(".status.running")).to_be_visible()
    screens.see("resumed")

    expect(page.locator("a.see")).to_be_visible()
    steps = events_of(run)
    assert [event["step"] for event in steps] == list(range(1, len(steps) + 1)), "no step missing or doubled"
    assert len(steps) > stopped
    expect(page.locator("[data-field=steps]")).to_have_text(str(len(steps)))
    screens.see("finished")
    page.locator("a.see").click()
    expect(page.locator(".exchange").first).to_be_visible()
    screens.see("verdict")

    _chat(page, screens, "Was kostet die Brotdose?")
    _export(page, screens)
    page.get_by_role("link", name="tunewell", exact=True).click()
    expect(page.locator(".run")).to_have_count(1)
    screens.see("home")
    assert watcher.faults + screens.faults == []


def test_college_rows_become_a_verdict_on_a_phone_by_keyboard_alone(browser, address, tmp_path):
    """A control that the keyboard does not reach, or that does not fit on a phone, ends the story."""
    url, _ = address
    page, watcher = open_page(_context(browser, 390, "dark"), url)
    screens = Screens(page, "phone")
    screens.see("home")
    _press(page, page.get_by_role("link", name=re.compile("New model|Choose your rows")))
    with page.expect_file_chooser() as chooser:
        _press(page, button(page, "Choose a file"))
    chooser.value.set_files(write_college(tmp_path / "college.jsonl"))
    expect(page.get_by_role("heading", level=1)).to_have_text("40 rows will be read like this")
    screens.see("read")
    _press(page, button(page, "This is right"))
    _press(page, page.get_by_text("Another model, or another method"))
    page.keyboard.press("Tab")
    page.keyboard.type("models/tiny")
    page.keyboard.press("Enter")
    expect(button(page, "Start training")).to_be_visible()
    screens.see("plan")
    _press(page, button(page, "Start training"))
    expect(page.locator(".canvas canvas")).to_be_visible()
    screens.see("running")
    _press(page, page.locator("a.see"))
    expect(page.locator(".exchange").first).to_be_visible()
    _press(page, page.get_by_role("button", name=re.compile("^wrong, ")))
    expect(page.locator(".mark.wrong").first).to_be_visible()
    screens.see("verdict")
    assert watcher.faults + screens.faults == []


def _press(page: Page, wanted) -> None:
    """Go to a control by the tab key, as someone without a mouse does, and press Enter."""
    wanted.first.wait_for()
    expect(wanted.first).to_be_enabled()
    for _ in range(200):
        if wanted.first.evaluate(
            "own => own === document.activeElement || own.parentElement === document.activeElement"
        ):
            page.keyboard.press("Enter")
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"the tab key does not reach {wanted}")


def _use_tiny_model(page: Page, screens: Screens) -> None:
    expect(page.get_by_role("heading", level=1)).to_have_text("Which model shall learn?")
    screens.see("model")
    page.get_by_text("Another model, or another method").click()
    page.locator("#other").fill("models/tiny")
    click(page, "Use this model")
    expect(button(page, "Start training")).to_be_visible()


def _change_epochs(page: Page) -> None:
    page.get_by_text("Change settings").click()
    page.get_by_label("Times over all rows").fill(_EPOCHS)
    click(page, "Plan again")
    expect(page.get_by_role("heading", name="Making the plan")).to_be_visible()
    expect(button(page, "Start training")).to_be_visible()


def _chat(page: Page, screens: Screens, question: str) -> None:
    page.get_by_role("link", name="Chat").click()
    click(page, "Start the chat")
    page.get_by_label("Your question").fill(question)
    page.keyboard.press("Enter")
    expect(button(page, "Start anew")).to_be_visible()
    for side in ("base", "tuned"):
        expect(page.locator(f"[data-side={side}] .said")).not_to_have_text("(empty)")
    screens.see("chat")
    click(page, "End the chat and free the memory")
    expect(button(page, "Start the chat")).to_be_visible()


def _export(page: Page, screens: Screens) -> None:
    page.get_by_role("link", name="Export").click()
    expect(button(page, "Export and prove")).to_be_visible()
    screens.see("export")
    click(page, "Export and prove")
    expect(page.locator(".verdict .level strong")).to_have_text("PROVEN")
    screens.see("exported")
    with page.expect_download() as saved:
        page.locator(".files .entry").first.click()
    assert saved.value.path().stat().st_size > 0


def test_axe_is_there():
    """Without it, the story says nothing about people who do not see or do not use a mouse."""
    if has_axe() is None:
        pytest.skip("axe-core is not installed: `make watch-story` does it")
