"""The page in Chromium: its numbers are those of the records, hostile texts stay texts, and many tabs work."""

import json
import re
import time

import pytest
from hostile_texts import PAYLOADS
from playwright.sync_api import expect
from story import chromium, open_page
from watching import TOKEN, append_lines, held_out, pretend_running, step, watching, write_lines, write_run

pytestmark = [pytest.mark.slow, pytest.mark.browser]

_ROWS = ".plot details > .scroll:nth-of-type(1) tbody tr"
"""The rows of the table that says the curve in numbers."""
_FOREIGN = "iframe, object, embed, video, base, meta[http-equiv], main :is(script, style, img, form[action])"


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


def _open(browser, client, run: str = "", tab: str = ""):
    page, watcher = open_page(browser.new_context(), f"{client.url}/#token={client.token}")
    if run:
        page.goto(f"{client.url}/#/run?id={run}{tab and f'&tab={tab}'}")
    return page, watcher


def _numbers(page) -> list[list[str]]:
    if not page.locator(".plot details[open]").count():
        page.get_by_text("The curve in numbers").click()
    expect(page.locator(_ROWS).first).to_be_visible()
    cells = "(rows) => rows.map((row) => [...row.children].map((cell) => cell.textContent))"
    return page.locator(_ROWS).evaluate_all(cells)


_HEALED = {"severity": "fault", "words": "a loss that is no number"}
_KINDS = {
    "healthy": ("finished", {}, []),
    "healed": ("finished", {3: "nan"}, [{"step": 3, "name": "nonfinite", "action": "skip", **_HEALED}]),
    "rewound": ("finished", {}, [{"step": 6, "name": "spike", "action": "rewind", "rewound_to": 4, **_HEALED}]),
    "killed": (None, {}, []),
    "resumed": ("interrupted", {7: "inf"}, []),
}
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "ms": 1e-3, "s": 1.0}
_SPOKEN = {"not a number": "nan", "infinite": "inf"}


def _read(shown: str) -> float:
    """Return the number that a text of the page says."""
    value, _, unit = _SPOKEN.get(shown, shown).replace(",", "").partition(" ")
    return float(value) * _UNITS.get(unit, 1.0)


@pytest.mark.parametrize("kind", _KINDS)
def test_every_number_of_every_step_is_that_of_its_record(tmp_path, browser, kind):
    """A value that is rounded to another one, left out or from another step would be a lie."""
    status, losses, healing = _KINDS[kind]
    run = write_run(tmp_path / "run", 0, status=status)
    events = [step(number, losses.get(number, 3 / number), grad_norm=0.1 * number) for number in range(1, 9)]
    write_lines(run / "events.jsonl", [held_out(0, 3.5), *events, held_out(8, 0.625)])
    write_lines(run / "healing.jsonl", healing)
    columns = {"Loss": "loss", "Learning rate": "learning_rate", "Memory": "memory_bytes", "Gradient": "grad_norm"}
    with watching(tmp_path) as client:
        page, watcher = _open(browser, client, "run")
        expect(page.locator("[data-field=steps]")).to_have_text("8")
        for name, key in columns.items():
            page.get_by_role("button", name=name, exact=True).click()
            shown = [(int(row[0]), *map(_read, row[1:])) for row in _numbers(page)[:8]]
            expected = [(own["step"], float(own[key]), own["seconds"]) for own in events]
            assert shown == [pytest.approx(own, rel=1e-3, nan_ok=True) for own in expected]
        assert page.locator(".facts > div", has_text="Loss").first.text_content() == f"Loss{events[-1]['loss']:.4f}"
        assert page.locator(".health li").count() == len(healing)
        expect(page.locator(".status")).to_have_class(re.compile(rf"\b{status or 'killed'}\b"))
        assert watcher.faults == []


def test_what_is_not_finite_is_said_in_words_and_never_shown_as_zero(tmp_path, browser):
    """A NaN that is drawn as 0 looks like a perfect model."""
    run = write_run(tmp_path / "run", 0)
    write_lines(run / "events.jsonl", [step(1, 2.5), step(2, "nan", grad_norm="inf"), step(3, 2.25)])
    healed = {
        "step": 2,
        "name": "nonfinite",
        "severity": "fault",
        "action": "skip",
        "words": "a loss that is no number",
    }
    write_lines(run / "healing.jsonl", [healed])
    with watching(tmp_path) as client:
        page, watcher = _open(browser, client, "run")
        expect(page.get_by_text("Not a finite number at step 2")).to_be_visible()
        expect(page.locator(".health li")).to_contain_text("a loss that is no number")
        assert [row[1] for row in _numbers(page)[:3]] == ["2.5000", "not a number", "2.2500"]
        page.get_by_role("button", name="Gradient").click()
        page.get_by_text("The curve in numbers").click()
        assert _numbers(page)[1][1] == "infinite"
        assert watcher.faults == []


def test_a_rewind_takes_undone_steps_off_the_page_within_a_second(tmp_path, browser):
    """Steps that no longer exist would stay on the page for ever."""
    run = write_run(tmp_path / "run", 8, status=None)
    pretend_running(run)
    log = run / "events.jsonl"
    with watching(tmp_path) as client:
        page, watcher = _open(browser, client, "run")
        assert len(_numbers(page)) == 8
        append_lines(log, step(9, 2.0), held_out(9, 1.75))
        expect(page.locator(_ROWS)).to_have_count(9, timeout=5000)
        write_lines(log, [json.loads(line) for line in log.read_text().splitlines()[:4]])
        started = time.monotonic()
        expect(page.locator(_ROWS)).to_have_count(4, timeout=5000)
        assert time.monotonic() - started < 1.5  # one second, and what the browser takes to be asked
        append_lines(log, step(5, 1.25))
        expect(page.locator(_ROWS)).to_have_count(5, timeout=5000)
        assert [row[0] for row in _numbers(page)] == ["1", "2", "3", "4", "5"]
        assert watcher.faults == []


def test_hostile_texts_in_every_record_stay_texts(tmp_path, browser):
    """A row or an answer that becomes part of the page could start work with the token."""
    text = " ".join(PAYLOADS).replace("HOST", "foreign.example").encode("utf-8", "replace").decode()
    run = write_run(tmp_path / "run", 3, status="failed")
    sample = {
        "step": 0,
        "document": 0,
        "prompt": text,
        "question": text,
        "answer": text,
        "reference": text,
        "ended": True,
    }
    write_lines(run / "samples.jsonl", [{**sample, "right": None, "fault": None}])
    healed = {"step": 2, "name": text[:40], "severity": "fault", "action": "skip", "words": text}
    write_lines(run / "healing.jsonl", [healed])
    (run / "crash.log").write_text(text)
    (run / "config.yaml").write_text(text)
    outcome = json.loads((run / "outcome.json").read_text())
    (run / "outcome.json").write_text(json.dumps(outcome | {"reason": text}))
    named = tmp_path / "<img src=x onerror=alert(1)>"
    write_run(named, 2)
    with watching(tmp_path) as client:
        page, watcher = _open(browser, client)
        expect(page.locator(".run")).to_have_count(2)
        for tab in ("", "verdict", "chat", "export"):
            page.goto(f"{client.url}/#/run?id=run&tab={tab}")
            page.locator(".tabs [aria-current]").wait_for()
            page.evaluate("document.querySelectorAll('details').forEach((own) => { own.open = true })")
            page.wait_for_timeout(500)
            assert page.locator(_FOREIGN).count() == 0
        page.goto(f"{client.url}/#/")
        page.get_by_role("link", name=named.name).click()
        expect(page.get_by_role("heading", level=1)).to_have_text(named.name)
        assert "owned" not in page.title()
        assert watcher.faults == []


def test_ten_tabs_that_are_opened_by_link_all_follow_the_run(tmp_path, browser):
    """A browser opens six connections to a host: an eleventh stream would block the page for ever."""
    run = write_run(tmp_path / "run", 3, status=None)
    pretend_running(run)
    with watching(tmp_path) as client:
        page, watcher = _open(browser, client)
        tabs = [page]
        for _ in range(9):
            with page.context.expect_page() as opened:
                page.locator(".run a").click(modifiers=["Control"])
            watcher.follow(opened.value)
            tabs.append(opened.value)
        page.locator(".run a").click()
        for tab in tabs:
            tab.wait_for_selector("[data-field=steps]")
        append_lines(run / "events.jsonl", step(4, 1.0))
        for tab in tabs:
            tab.bring_to_front()
            tab.get_by_text("The curve in numbers").click()
            expect(tab.locator(_ROWS)).to_have_count(4, timeout=15_000)
        assert watcher.faults == []


def test_without_the_token_there_is_a_way_in_and_nothing_else(tmp_path, browser):
    """A page without its address would be blank, or show runs to whoever asks."""
    write_run(tmp_path / "run", 3)
    with watching(tmp_path) as client:
        page = browser.new_context().new_page()
        page.goto(f"{client.url}/")
        expect(page.get_by_role("heading", level=1)).to_have_text("Open the address from the terminal")
        assert page.locator(".run").count() == 0
        page.get_by_label("Address or token").fill(f"{client.url}/#token={TOKEN}")
        page.get_by_role("button", name="Open").click()
        expect(page.locator(".run")).to_have_count(1)
        assert TOKEN not in page.url
        page.reload()
        expect(page.locator(".run")).to_have_count(1)
