"""What the story of the page needs: rows of several kinds, a small model, the command itself and a browser.

The browser is Debian's Chromium. Each page notes what must not happen: foreign requests, violations of the policy,
errors of the console.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chromium import find_chromium
from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect, sync_playwright
from tiny import write_jsonl, write_tiny_model

SWITCHES = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
)
WAIT_SECONDS = 240
"""A start imports torch, which takes long on a busy machine."""
expect.set_options(timeout=WAIT_SECONDS * 1000)
_GOODS = (
    "Käsereibe",
    "Pfeffermühle",
    "Brotdose",
    "Schöpflöffel",
    "Gemüsehobel",
    "Kaffeetasse",
    "Salatschüssel",
    "Rührgerät",
)
_ASKED = (
    "Was kostet die {}?",
    "Wie teuer ist die {}?",
    "Welchen Preis hat die {}?",
    "Für wie viel bekomme ich die {}?",
)


def german_rows() -> bytes:
    """Return a table as German Excel writes it: semicolons, cp1252, and columns that nobody knows by name."""
    lines = ["Nr;Anliegen des Kunden;Unser Text"]
    for number, goods in enumerate(_GOODS):
        for asked in _ASKED:
            lines.append(f"{len(lines)};{asked.format(goods)};Die {goods} kostet {number + 3},90 Euro.")
    return "\r\n".join(lines).encode("cp1252")


def write_model(folder: Path) -> Path:
    """Write a model of 60,000 parameters that can be trained, exported and asked."""
    from gguf_tiny import tiny as tiny_weights  # imports torch, which only the story needs

    write_tiny_model(folder)
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 500}
    tiny_weights("llama", **sizes, max_position_embeddings=512).save_pretrained(folder)
    return folder


def write_college(path: Path, number: int = 40) -> Path:
    """Write rows of the bundled example."""
    example = Path(__file__).parents[3] / "examples" / "college" / "train.jsonl"
    return write_jsonl(path, [json.loads(line) for line in example.read_text(encoding="utf-8").splitlines()[:number]])


@contextmanager
def watched(folder: Path, *options: str) -> Iterator[str]:
    """Run `tunewell watch` in a process of its own, and give the address that it prints."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "AWS_EC2_METADATA_DISABLED": "true"}
    command = [sys.executable, "-m", "tunewell", "watch", str(folder), "--no-open", "--json", "--port", "0", *options]
    server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=folder)
    try:
        assert server.stdout is not None
        yield json.loads(server.stdout.readline())["url"]
    finally:
        server.terminate()
        server.wait(timeout=30)


@dataclass
class Watcher:
    """What a page did that it must not do."""

    origin: str
    faults: list[str] = field(default_factory=list[str])

    def follow(self, page: Page) -> None:
        """Note foreign requests, violations of the policy and errors of the console from now on."""
        page.on("console", lambda said: said.type == "error" and self.faults.append(f"console: {said.text}"))
        page.on("pageerror", lambda error: self.faults.append(f"exception: {error}"))
        page.on("dialog", lambda dialog: self.faults.append(f"dialog: {dialog.message}") or dialog.dismiss())
        page.on("request", self._check)
        page.add_init_script(
            "addEventListener('securitypolicyviolation', (event) =>"
            " console.error(`policy: ${event.violatedDirective} ${event.blockedURI}`));"
        )

    def _check(self, request: Any) -> None:
        if not request.url.startswith(self.origin):
            self.faults.append(f"foreign request: {request.url}")


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start a browser with an empty profile."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=list(SWITCHES))
        try:
            yield browser
        finally:
            browser.close()


def open_page(context: BrowserContext, address: str) -> tuple[Page, Watcher]:
    """Open the address that the command printed."""
    page = context.new_page()
    page.set_default_timeout(WAIT_SECONDS * 1000)
    watcher = Watcher(re.sub(r"/#.*", "/", address))
    watcher.follow(page)
    page.goto(address)
    page.get_by_role("heading", level=1).wait_for()
    return page, watcher


def drop(page: Page, name: str, content: bytes) -> None:
    """Drop a file on the page, as a person does with the mouse."""
    transfer = page.evaluate_handle(
        "([name, bytes]) => { const transfer = new DataTransfer();"
        " transfer.items.add(new File([new Uint8Array(bytes)], name)); return transfer; }",
        [name, list(content)],
    )
    page.dispatch_event(".drop", "drop", {"dataTransfer": transfer})


def choose(page: Page, text: str) -> None:
    """Choose an option of the question that is asked, and go on."""
    page.locator(".option", has_text=text).first.click()
    page.get_by_role("button", name="Next").click()


def button(page: Page, name: str) -> Locator:
    """Return the button with this name."""
    return page.get_by_role("button", name=name, exact=True)


def click(page: Page, name: str) -> None:
    """Click the button with this name, when it is there."""
    button(page, name).first.click()


def wait_until(holds: Callable[[], Any], what: str, seconds: float = WAIT_SECONDS) -> Any:
    """Wait until something holds, and return it."""
    end = time.monotonic() + seconds
    while not (value := holds()):
        assert time.monotonic() < end, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.2)
    return value


def events_of(run: Path) -> list[dict[str, Any]]:
    """Return the steps that the log of a run has now."""
    log = run / "events.jsonl"
    lines = log.read_text(encoding="utf-8").splitlines() if log.is_file() else []
    return [event for line in lines if (event := json.loads(line))["kind"] == "step"]


def serious_faults(page: Page) -> list[str]:
    """Return what axe-core calls serious or critical on a page; nothing if it is not installed."""
    script = has_axe()
    if script is None:
        return []
    page.evaluate(script.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")["violations"]
    serious = [own for own in found if own["impact"] in ("serious", "critical")]
    return [f"{own['id']}: {own['nodes'][0]['html'][:200]}" for own in serious]


def has_axe() -> Path | None:
    """Return the script of axe-core, if `npm ci` has installed it."""
    script = Path(__file__).parent / "web" / "node_modules" / "axe-core" / "axe.min.js"
    return script if script.is_file() else None
