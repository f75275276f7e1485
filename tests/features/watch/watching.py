"""A real server on a free port for the tests of this folder, a client, and runs whose records are known."""

import http.client
import json
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from tunewell.features.watch.app import build_app
from tunewell.features.watch.watched import Watched
from tunewell.web.access import listen, make_server

TOKEN = "a-token-of-this-test-0123456789"


@dataclass(frozen=True)
class Client:
    """Sends requests to the page's API."""

    url: str
    root: Path
    token: str = TOKEN

    def request(
        self, method: str, path: str, body: Any = None, *, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes, dict[str, str]]:
        """Return the status, the body and the headers of an answer."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
        sent = {"authorization": f"Bearer {self.token}", "content-type": kind} | (headers or {})
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=60)
        try:
            connection.request(method, path, data, {name: value for name, value in sent.items() if value})
            answer = connection.getresponse()
            return answer.status, answer.read(), {name.lower(): value for name, value in answer.getheaders()}
        finally:
            connection.close()

    def get(self, name: str, /, **query: Any) -> Any:
        """Return the JSON of a GET, which must succeed."""
        status, data, _ = self.request("GET", f"/api/v1/{name}?{urlencode(query)}")
        assert status == 200, data
        return json.loads(data)

    def error(self, method: str, name: str, body: Any = None, /, **query: Any) -> tuple[int, dict[str, Any]]:
        """Return the status and the error of a request, which must fail in a way that the page can show."""
        status, data, _ = self.request(method, f"/api/v1/{name}?{urlencode(query)}", body)
        assert status >= 400, data
        found = json.loads(data)["error"]
        assert found["what"]
        return status, found

    def post(self, name: str, /, **body: Any) -> Any:
        """Return the JSON of a POST, which must succeed."""
        status, data, _ = self.request("POST", f"/api/v1/{name}", body)
        assert status == 200, data
        return json.loads(data)

    def work(self, name: str, /, **body: Any) -> tuple[str, Any]:
        """Return the last event of a POST that answers with a stream: its kind and its data."""
        status, data, _ = self.request("POST", f"/api/v1/{name}", body)
        assert status == 200, data
        return parse_events(data.decode())[-1][:2]

    def upload(self, name: str, data: bytes, **query: str) -> Any:
        """Upload a file, and return the answer."""
        status, answer, _ = self.request("POST", f"/api/v1/uploads?{urlencode({'name': name} | query)}", data)
        assert status == 200, answer
        return json.loads(answer)

    @contextmanager
    def stream(self, last_id: str = "", **query: Any) -> Iterator["Stream"]:
        """Open a stream."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=30)
        headers = {"authorization": f"Bearer {self.token}"} | ({"last-event-id": last_id} if last_id else {})
        try:
            connection.request("GET", f"/api/v1/stream?{urlencode(query)}", headers=headers)
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            yield Stream(answer)
        finally:
            if connection.sock:
                connection.sock.shutdown(socket.SHUT_RDWR)
            connection.close()


class Stream:
    """The events of a stream, as they arrive."""

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self._answer = answer
        self.last_id = ""

    def events(self) -> Iterator[tuple[str, Any]]:
        """Yield the kind and the data of each event, until the stream ends."""
        lines: list[str] = []
        while line := self._answer.readline().decode():
            if line != "\n":
                lines.append(line)
                continue
            for kind, data, id_ in parse_events("".join(lines) + "\n"):
                self.last_id = id_ or self.last_id
                yield kind, data
            lines = []

    def until(self, kind: str) -> Any:
        """Return the data of the next event of a kind."""
        return next(data for found, data in self.events() if found == kind)


def parse_events(text: str) -> list[tuple[str, Any, str]]:
    """Return the kind, the data and the id of each server-sent event in a text."""
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if "event" in fields:
            found.append((fields["event"], json.loads(fields["data"]), fields.get("id", "")))
    return found


@contextmanager
def watching(root: Path, *, is_read_only: bool = False) -> Iterator[Client]:
    """Serve the page of a folder for a while, by uvicorn in a thread."""
    address = listen("127.0.0.1", 0, has_token=False)
    watched = Watched(root.resolve(), is_read_only)
    server = make_server(build_app(watched, token=TOKEN, host="127.0.0.1", is_loopback=True))
    watched.is_over = lambda: server.should_exit
    thread = threading.Thread(target=server.run, kwargs={"sockets": [address.listener]})
    thread.start()
    try:
        yield Client(address.url, root)
    finally:
        server.should_exit = True
        thread.join(timeout=20)
        assert not thread.is_alive(), "the server did not end"


# Runs with known records.


def step(number: int, loss: float | str = 1.0, **more: Any) -> dict[str, Any]:
    """Return a step as `events.jsonl` has it."""
    numbers = {"epoch": number / 10, "grad_norm": 0.5, "learning_rate": 1e-4, "tokens": 100, "seconds": 0.25}
    return {"kind": "step", "step": number, "loss": loss, **numbers, "memory_bytes": 10**9, "was_skipped": False} | more


def held_out(number: int, loss: float, **more: Any) -> dict[str, Any]:
    """Return an evaluation as `events.jsonl` has it."""
    return {"kind": "held_out", "step": number, "loss": loss, "seconds": 0.1, "is_best": True} | more


def write_lines(path: Path, events: Sequence[dict[str, Any]]) -> None:
    """Replace a log, as a resume does: by a new file."""
    staged = path.with_name(".staged")
    staged.write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    staged.replace(path)


def append_lines(path: Path, *events: dict[str, Any]) -> None:
    """Append events to a log."""
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(event) + "\n" for event in events))


def write_run(folder: Path, num_steps: int = 5, *, planned: int = 10, status: str | None = "finished") -> Path:
    """Write a run with these steps; without a status it looks like one that was killed."""
    folder.mkdir(parents=True)
    because = {"because": "a test"}
    chosen = {"num_steps": planned, "device": "cpu", "method": "lora", "learning_rate": 1e-4, "evaluate_every": 5}
    plan = {name: {"value": value, **because} for name, value in chosen.items()}
    config = {"data": {"sources": [{"path": "rows.jsonl"}]}}
    (folder / "plan.json").write_text(json.dumps({**plan, "model": "preset:tiny-1m", "config": config}))
    (folder / "config.yaml").write_text("model: preset:tiny-1m\n")
    write_lines(folder / "events.jsonl", [step(number, 3 - number / 10) for number in range(1, num_steps + 1)])
    if status:
        outcome = {"status": status, "reason": f"{status} after {num_steps} steps", "steps": num_steps}
        outcome |= {"planned_steps": planned, "last_loss": 3 - num_steps / 10, "held_out": {"best": 1.5}}
        (folder / "outcome.json").write_text(json.dumps(outcome))
    return folder


def pretend_running(folder: Path, pid: int | None = None) -> None:
    """Let a run look as if a process works in it."""
    owner = {"pid": pid or os.getpid(), "host": socket.gethostname(), "since": "2026-11-19 12:00:00+00:00"}
    (folder / ".lock").write_text(json.dumps(owner))


def encoded(text: str) -> str:
    """Return a text with each character encoded, as an attacker writes a path."""
    return "".join(f"%{byte:02x}" for byte in text.encode()) if text else quote(text)
