"""Files on web servers, which may support neither ranges nor versions."""

import threading
from dataclasses import dataclass
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tunewell.config.rules import Storage
from tunewell.core.errors import UserError
from tunewell.data.sources.base import SourceOptions, find_files
from tunewell.features.remote import fetch, store

_OLD, _NEW = "Wed, 21 Oct 2015 07:28:00 GMT", "Fri, 21 Oct 2016 07:28:00 GMT"


@dataclass
class Site:
    """What the server sends next."""

    body: bytes = b'{"text": "first"}\n' * 200_000
    changed: str | None = _OLD
    etag: str | None = None
    has_ranges: bool = True
    has_length: bool = True
    cut_after: int | None = None
    next: "Site | None" = None
    """Takes the place of this one after the connection was cut."""


@pytest.fixture
def serve(monkeypatch, tmp_path):
    """Return a function that sets what the server sends, and returns the address of the file."""
    monkeypatch.setenv("TUNEWELL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetch, "_WAITS", (0.01,))
    backoff = {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=5), "base": 2}
    monkeypatch.setitem(store.RETRY_CONFIG, "backoff", backoff)
    current: list[Site] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            site, start = current[-1], 0
            if site.has_ranges and (wanted := self.headers.get("Range")):
                start = int(wanted.removeprefix("bytes=").partition("-")[0])
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(site.body) - 1}/{len(site.body)}")
            for name, value in (("Last-Modified", site.changed), ("ETag", site.etag)):
                if value:
                    self.send_header(name, value)
            if site.has_length:
                self.send_header("Content-Length", str(len(site.body) - start))
            self.close_connection = not site.has_length or site.cut_after is not None
            self.end_headers()
            if self.command == "GET":
                end = len(site.body) if site.cut_after is None else start + site.cut_after
                self.wfile.write(site.body[start:end])
                if site.next:
                    current.append(site.next)

        do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # a client that hangs up
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()

    def change(**values) -> str:
        current.append(Site(**values))
        return f"http://127.0.0.1:{server.server_port}/rows.jsonl"

    yield change
    server.shutdown()
    server.server_close()


def content(address: str) -> bytes:
    (file,) = find_files(address, base=Path(), options=SourceOptions(Storage()))
    with file.open() as stream:
        return stream.read()


def test_a_server_without_ranges_is_read_again_after_a_cut(serve):
    """The part of the first attempt stayed in the cache, and every later attempt was refused."""
    assert content(serve(has_ranges=False, cut_after=2_500_000, next=Site(has_ranges=False))) == Site.body


@pytest.mark.parametrize(
    ("before", "after"),
    [({}, {"changed": _NEW}), ({"etag": 'W/"1"'}, {"etag": 'W/"2"'})],
    ids=["time", "weak ETag"],
)
def test_a_file_that_is_replaced_after_a_cut_is_not_joined_from_two_versions(before, after, serve):
    """Such servers ignore If-Match: a file of equal length began with the old rows and ended with the new ones."""
    new = b'{"text": "other"}\n' * 200_000
    address = serve(**before, cut_after=2_500_000, next=Site(body=new, **after))
    with pytest.raises(UserError, match="changed while it was read"):
        content(address)
    assert content(address) == new


def test_a_server_without_versions_is_read_again_each_time(serve):
    """The stamp was the size alone, so new rows of the same size were never seen."""
    assert content(serve(changed=None)) == Site.body
    new = b'{"text": "other"}\n' * 200_000
    assert content(serve(changed=None, body=new)) == new


def test_a_file_of_unknown_length_is_not_called_a_network_problem(serve):
    with pytest.raises(UserError, match="Content-Length") as caught:
        content(serve(has_length=False))
    assert caught.value.fix == "download the file, and give its path"


def test_an_address_that_cannot_be_parsed_is_an_error_of_the_user():
    with pytest.raises(UserError, match="the address is not valid"):
        content("https://[::1/rows.jsonl")
