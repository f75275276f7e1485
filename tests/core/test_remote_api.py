"""A server that the user named is asked, but its answers are not trusted."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from tunewell.core import remote_api
from tunewell.core.errors import UserError
from tunewell.core.remote_api import RemoteApi

OK = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"


@contextlib.contextmanager
def answering(*answers: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """A server that sends these bytes, whatever it is asked; gives its address and what it received."""
    received: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for answer in answers:
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    # Bytes that are not read when a connection is closed make it end with a reset.
                    connection.settimeout(0.2)
                    received.append(connection.recv(65_536))
                    with contextlib.suppress(TimeoutError):
                        while not received[-1].endswith(b"}") and (more := connection.recv(65_536)):
                            received[-1] += more
                    connection.sendall(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", received


def api(url: str) -> RemoteApi:
    return RemoteApi(f"{url}#m", what="the server", key_variable="TUNEWELL_TEST_KEY", silence_seconds=5)


def test_an_answer_is_read_and_the_key_is_sent(monkeypatch):
    monkeypatch.setenv("TUNEWELL_TEST_KEY", "secret")
    with answering(OK + b'{"a": 1}') as (url, received):
        assert api(url).answer("x", {}) == {"a": 1}
    assert b"Authorization: Bearer secret" in received[0] and received[0].startswith(b"POST /x ")


def test_the_key_does_not_follow_a_redirect(monkeypatch):
    """urllib sends the key to any server that the first one names."""
    monkeypatch.setenv("TUNEWELL_TEST_KEY", "secret")
    with answering(OK + b"{}") as (other, stolen):
        redirect = f"HTTP/1.1 302 Found\r\nLocation: {other}/x\r\nContent-Length: 0\r\n\r\n".encode()
        with answering(redirect) as (url, _), pytest.raises(UserError, match="redirects") as refusal:
            api(url).answer("x", {})
        assert not stolen and other in str(refusal.value.where)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"SSH-2.0-OpenSSH\r\n", "not valid HTTP|does not answer"),
        (b"", "does not answer|not valid HTTP"),
        (OK + b"x" * 200_000, "larger than"),
        (OK + b"[" * 50_000, "not valid JSON"),
        (OK + b"\xff\xfe", "not valid JSON"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{", "not valid"),
        (b"HTTP/1.1 404 No\r\nContent-Length: 4\r\n\r\nnope", "rejected the request: status 404"),
    ],
)
def test_a_hostile_answer_is_an_error_with_the_address(monkeypatch, answer, says):
    monkeypatch.setattr(remote_api, "MAX_ANSWER_BYTES", 100_000)
    with answering(answer) as (url, _), pytest.raises(UserError, match=says):
        api(url).answer("x", {})


def test_lines_have_a_limit(monkeypatch):
    monkeypatch.setattr(remote_api, "MAX_LINE_BYTES", 1_000)
    with answering(OK + b"data: 1\n" + b"x" * 5_000) as (url, _), pytest.raises(UserError, match="a line"):
        list(api(url).lines("x", {}))


@pytest.mark.parametrize("address", ["file:///etc/passwd#m", "ftp://host/#m", "/etc/passwd#m", "http://host"])
def test_only_addresses_of_servers_with_a_model_are_accepted(address):
    with pytest.raises(UserError):
        RemoteApi(address, what="the server", key_variable="X")
