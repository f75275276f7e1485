"""Drive a real Chromium over its DevTools pipe, with nothing but the standard library.

Chromium reads commands on file descriptor 3 and writes answers on 4, each a JSON object that ends with a NUL.
"""

import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_WAIT_SECONDS = 60.0


class Page:
    """One open page, and everything it reported while it was open."""

    def __init__(self, read: int, write: int) -> None:
        self.events: list[dict[str, Any]] = []
        self._read, self._write, self._number, self._buffer = read, write, 0, b""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    _session: str | None = None

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and give its result; what else arrives is kept in `events`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def open(
        self, address: str, *, width: int = 1280, height: int = 900, media: str = "", scheme: str = "light"
    ) -> None:
        """Open an address in a window of some size and colour scheme, and wait until it is loaded."""
        self.resize(width, height)
        self.dress(media=media, scheme=scheme)
        before = len(self.events)
        self.ask("Page.navigate", url=address)
        self._until(lambda: any(event["method"] == "Page.loadEventFired" for event in self.events[before:]))

    def resize(self, width: int, height: int) -> None:
        """Give the window a size, as a phone would where it is narrow."""
        is_phone = width < 600
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if is_phone else 1,
            mobile=is_phone,
        )

    def dress(self, *, media: str = "", scheme: str = "light") -> None:
        """Choose `screen` or `print`, and light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("Emulation.setEmulatedMedia", media=media, features=features)

    def value_of(self, expression: str) -> Any:
        """Evaluate an expression in the page; the page's own policy does not apply to this."""
        result = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, seconds: float) -> None:
        """Let the page do what it has planned, and collect what it reports."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if select.select([self._read], [], [], left)[0]:
                self._next()

    def told(self, method: str) -> list[dict[str, Any]]:
        """List the parameters of every event of one kind."""
        return [event["params"] for event in self.events if event["method"] == method]

    def _until(self, is_done: Any) -> None:
        end = time.monotonic() + _WAIT_SECONDS
        while not is_done():
            assert time.monotonic() < end, "the page did not load"
            self._next()

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._read], [], [], _WAIT_SECONDS)[0], "Chromium does not answer"
            block = os.read(self._read, 1 << 20)
            assert block, "Chromium has ended"
            self._buffer += block
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        if "method" in message:
            self.events.append(message)
            if message["method"] == "Page.javascriptDialogOpening":
                self._close_dialog()
        return message

    def _close_dialog(self) -> None:
        # An open dialog stops the page and every later answer; it stays in `events`.
        command = {
            "id": 0,
            "method": "Page.handleJavaScriptDialog",
            "params": {"accept": False},
            "sessionId": self._session,
        }
        os.write(self._write, json.dumps(command).encode() + b"\0")


def find_chromium() -> str:
    """Find the browser; a clear failure where there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    assert found, f"these tests need Chromium: install one of {', '.join(NAMES)} and put it on the PATH"
    return found


@contextmanager
def chromium() -> Iterator[Page]:
    """Start a browser with an empty profile, give a page of it, and end it."""
    command_read, command_write = os.pipe()
    answer_read, answer_write = os.pipe()
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        browser = _start(profile, command_read=command_read, answer_write=answer_write)
        os.close(command_read)
        os.close(answer_write)
        try:
            yield Page(answer_read, command_write)
        finally:
            os.close(command_write)
            os.close(answer_read)
            browser.terminate()
            try:
                browser.wait(timeout=20)
            except subprocess.TimeoutExpired:
                browser.kill()
                browser.wait()


def _start(profile: str, *, command_read: int, answer_write: int) -> subprocess.Popen[bytes]:
    switches = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
    quiet = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--mute-audio")
    words = [find_chromium(), *switches, *quiet, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
    # The shell puts the pipes where Chromium looks for them; between fork and exec Python would do it with less safety.
    line = f'exec "$@" 3<&{command_read} 4>&{answer_write}'
    return subprocess.Popen(
        ["bash", "-c", line, "chromium", *words],
        pass_fds=(command_read, answer_write),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def address_of(path: Path) -> str:
    """Give the address of a file."""
    return path.resolve().as_uri()
