"""Slow, idle and greedy clients: each is rejected, and others get their answers meanwhile."""

import json
import socket
import threading
import time
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import pytest
from serving import NAME, Letters, chat, send, served

from tunewell.features.serve import server
from tunewell.web import connections

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


class Ready(Letters):
    """A model that writes at once, and counts the prompts that it encodes."""

    context_length = 512

    def __init__(self) -> None:
        super().__init__()
        self.num_encoded = 0
        self.may_write.release(100_000)

    def encode(self, messages, max_new_tokens):
        self.num_encoded += 1
        return super().encode(messages, max_new_tokens)


@pytest.fixture
def model():
    return Ready()


@pytest.fixture
def url(model, monkeypatch):
    monkeypatch.setattr(connections, "max_files", lambda: 4 * connections.MAX_WAITING)
    with served(model) as url:
        yield url


def connect(url: str, data: bytes = b"", *, stack: ExitStack) -> socket.socket:
    """Open a connection, send some bytes, and keep it open until the stack is closed."""
    host, port = urlsplit(url).netloc.split(":")
    connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
    connection.sendall(data)
    return connection


def answer_of(connection: socket.socket) -> tuple[int, dict]:
    """Read until the server closes the connection; return the status and the error."""
    data = b""
    while part := connection.recv(65_536):
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.mark.parametrize(
    ("num_clients", "sent"),
    [(140, HEAD[:60]), (300, b""), (140, HEAD + b"Content-Length: 4000\r\n\r\n{"), (140, b"\r\n")],
    ids=["half heads", "idle", "half bodies", "blank lines"],
)
def test_slow_clients_lock_nobody_out(url, num_clients, sent):
    """128 connections were the limit, and slow ones held their places for ever."""
    with ExitStack() as stack:
        for _ in range(num_clients):
            connect(url, sent, stack=stack)
        for _ in range(3):
            assert send(url, chat(max_tokens=1))[0] == 200


def test_the_oldest_unfinished_request_is_told_why_it_is_closed(url, monkeypatch):
    monkeypatch.setattr(connections, "MAX_SHARE_PER_CLIENT", 3 / connections.MAX_WAITING)
    with ExitStack() as stack:
        first = connect(url, HEAD[:60], stack=stack)
        # The server has read it: it answers later requests on other connections.
        for _ in range(2):
            assert send(url, None, "/health", method="GET")[0] == 200
        for _ in range(3):
            connect(url, HEAD[:60], stack=stack)
        status, error = answer_of(first)
        assert (status, error["code"]) == (503, "too_many_connections")


def test_a_client_that_is_answered_is_never_closed_for_a_newer_one(url, monkeypatch, model):
    monkeypatch.setattr(connections, "MAX_SHARE_PER_CLIENT", 2 / connections.MAX_WAITING)
    while model.may_write.acquire(blocking=False):
        pass
    answers: list[int] = []
    client = threading.Thread(target=lambda: answers.append(send(url, chat(max_tokens=1))[0]))
    client.start()
    while not model.num_begun:
        time.sleep(0.01)
    with ExitStack() as stack:
        for _ in range(6):
            connect(url, HEAD[:60], stack=stack)
        assert send(url, None, "/health", method="GET")[0] == 200
        model.may_write.release()
        client.join(20)
    assert answers == [200]


@pytest.mark.parametrize("part", ["head", "body"])
def test_a_request_that_does_not_arrive_in_time_is_told_so(url, monkeypatch, part):
    """There was no time limit."""
    monkeypatch.setitem(connections.SECONDS, part, 0.3)
    with ExitStack() as stack:
        status, error = answer_of(
            connect(url, HEAD[:60] if part == "head" else HEAD + b"Content-Length: 9\r\n\r\n{", stack=stack)
        )
        assert (status, error["code"]) == (408, "request_timeout") and part in error["message"]


def test_one_byte_at_a_time_does_not_extend_the_deadline(url, monkeypatch):
    monkeypatch.setitem(connections.SECONDS, "head", 0.5)
    with ExitStack() as stack:
        connection = connect(url, HEAD, stack=stack)
        connection.settimeout(0.1)
        data = b""
        for _ in range(100):
            try:
                connection.sendall(b"x")
                data += connection.recv(65_536)
            except TimeoutError:
                continue
            except OSError:
                break
            if data:
                break
        assert data.startswith(b"HTTP/1.1 408 ")


def test_idle_connections_are_closed_without_a_word(url, monkeypatch):
    """A client would take an error for the answer to the request that it sends next."""
    monkeypatch.setitem(connections.SECONDS, "head", 0.2)
    with ExitStack() as stack:
        assert connect(url, stack=stack).recv(100) == b""


@pytest.mark.parametrize("size", [10**12, 200_000_000, (4 << 20) + 1])
def test_a_body_that_is_announced_too_large_is_refused_before_it_is_sent(url, monkeypatch, size):
    monkeypatch.setitem(connections.SECONDS, "rest", 0.2)
    with ExitStack() as stack:
        status, error = answer_of(connect(url, HEAD + f"Content-Length: {size}\r\n\r\n".encode(), stack=stack))
    assert (status, error["code"]) == (413, "request_too_large")


def test_a_body_without_end_is_not_read_to_its_end(url):
    """A client that goes on sending after the error costs time, not memory; then it is cut off."""
    sent = 0
    with ExitStack() as stack, pytest.raises(OSError):
        connection = connect(url, HEAD + b"Content-Length: 1000000000000\r\n\r\n", stack=stack)
        while sent < connections.MAX_REST_BYTES * 4:
            sent += connection.send(b"x" * 1_000_000)
    assert sent < connections.MAX_REST_BYTES * 2


def test_unfinished_requests_share_a_limit_on_memory(url, monkeypatch):
    monkeypatch.setattr(connections, "MAX_WAITING_BYTES", 3_000_000)
    begin = HEAD + b"Content-Length: 4000000\r\n\r\n"
    with ExitStack() as stack:
        small = connect(url, begin + b"x" * 500_000, stack=stack)
        large = connect(url, begin + b"x" * 2_000_000, stack=stack)
        time.sleep(0.3)
        connect(url, begin + b"x" * 900_000, stack=stack)
        assert answer_of(large)[1]["code"] == "too_many_connections"
        small.setblocking(False)
        with pytest.raises(BlockingIOError):
            small.recv(1)


@pytest.mark.parametrize(
    "messages",
    [[{"role": "user", "content": "a"}] * 60_000, [{"role": "user", "content": "word " * 780_000}]],
    ids=["60,000 messages", "3.9 MB"],
)
def test_prompts_are_refused_by_size_before_they_are_tokenized(url, model, messages):
    """Both took 4 seconds to refuse, and every other prompt waited."""
    status, answer = send(url, chat(messages=messages))
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "context_length_exceeded", "messages")
    assert model.num_encoded == 0


def test_one_client_cannot_fill_the_queue(monkeypatch):
    monkeypatch.setattr(server, "MAX_REQUESTS_PER_CLIENT", 2)
    model = Letters()
    with served(model) as url:
        answers: list[Any] = []
        ask = lambda: answers.append(send(url, chat(max_tokens=1, model=NAME)))  # noqa: E731
        clients = [threading.Thread(target=ask) for _ in range(3)]
        for client in clients:
            client.start()
        while not answers:  # two wait for the model, and the third is refused, whichever it is
            time.sleep(0.01)
        assert answers[0][0] == 429 and answers[0][1]["error"]["code"] == "too_many_requests"
        model.may_write.release(9)
        for client in clients:
            client.join(20)
        assert [answer[0] for answer in answers] == [429, 200, 200] and send(url, chat(max_tokens=1))[0] == 200


def test_an_honest_client_that_sends_many_requests_at_once_is_answered(monkeypatch):
    """An evaluation sends all its questions at once; 64 were the limit, and OpenAI's client gave up after 3 seconds."""
    monkeypatch.setattr(server, "max_files", lambda: 8192)
    model = Letters()
    with served(model) as url:
        statuses: list[int] = []
        ask = lambda: statuses.append(send(url, chat(max_tokens=1))[0])  # noqa: E731
        clients = [threading.Thread(target=ask) for _ in range(90)]
        for client in clients:
            client.start()
        time.sleep(0.5)  # all of them wait
        model.may_write.release(90)
        for client in clients:
            client.join(20)
        assert statuses == [200] * 90


@pytest.mark.parametrize("limit", [-1, 1024])
def test_a_process_without_a_limit_on_files_serves(monkeypatch, limit):
    """Linux reports no limit as -1, and every connection was closed."""
    resource = pytest.importorskip("resource", reason="Windows has no such limits")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    with served(Ready()) as url:
        assert send(url, chat(max_tokens=1))[0] == 200


def test_streams_leave_the_queue(url, monkeypatch):
    monkeypatch.setattr(server, "MAX_REQUESTS_PER_CLIENT", 1)
    for _ in range(3):
        with ExitStack() as stack:
            body = json.dumps(chat(max_tokens=2, stream=True)).encode()
            head = HEAD + f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            connection, data = connect(url, head + body, stack=stack), b""
            while part := connection.recv(65_536):
                data += part
        assert b"[DONE]" in data


@pytest.mark.slow
def test_a_client_that_does_not_read_its_answer_is_cut_off(monkeypatch):
    """Otherwise each such client holds a place in the queue for ever."""
    monkeypatch.setattr(connections, "READ_SECONDS", 0.3)
    lost = threading.Event()
    inherited = connections.LimitedProtocol.connection_lost
    monkeypatch.setattr(
        connections.LimitedProtocol, "connection_lost", lambda self, exc: (inherited(self, exc), lost.set())
    )
    model = Ready()
    model.context_length = 100_000
    with served(model) as url, ExitStack() as stack:
        body = json.dumps(chat(max_tokens=60_000, stream=True)).encode()
        connect(url, HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body, stack=stack)
        assert lost.wait(30)


@pytest.mark.parametrize("host", ["evil.com@localhost", "localhost:evil.com", "localhost:80:80", "localhost:", "[::1"])
def test_a_host_header_is_a_name_and_a_port(url, host):
    """A URL parser takes `evil.com@localhost` for the host `localhost`."""
    assert send(url, chat(max_tokens=1), host=host)[0] in (400, 403)


@pytest.mark.parametrize("junk", [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"hello"])
def test_what_is_not_http_gets_an_error_in_the_same_format(url, junk):
    with ExitStack() as stack:
        status, error = answer_of(connect(url, junk + b"\r\n\r\n", stack=stack))
        assert (status, error["code"]) == (400, "invalid_http")


def test_a_head_without_end_is_refused(url):
    with ExitStack() as stack:
        connection = connect(url, HEAD, stack=stack)
        time.sleep(0.1)
        connection.sendall(b"x-header: " + b"y" * 17_000)
        status, error = answer_of(connection)
        assert (status, error["code"]) == (431, "head_too_large")


def test_errors_do_not_repeat_long_texts(url):
    for change in ({"model": "m" * 100_000}, {"k" * 100_000: 1}):
        status, answer = send(url, chat(**change))
        assert status in (400, 404) and len(answer["error"]["message"]) < 1_000
