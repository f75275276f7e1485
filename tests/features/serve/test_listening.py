"""Where a server may listen, and what a token must be."""

import socket
import threading

import pytest
from serving import Letters, chat, send

from tunewell.core.errors import UserError
from tunewell.features.serve.server import AccessRules, build_app
from tunewell.web.access import listen, make_server, read_token


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.8.8.8"])
def test_this_machine_needs_no_token(host):
    address = listen(host, 0, has_token=False)
    with address.listener:
        assert address.is_loopback and address.port > 0
        assert address.url == f"http://{address.host}:{address.port}"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "0", "::ffff:0.0.0.0", "10.1.2.3", "8.8.8.8"])
def test_any_other_address_is_refused_without_one(host):
    """Whoever is on the same network would have the model."""
    with pytest.raises(UserError, match="without a token") as refusal:
        listen(host, 0, has_token=False)
    assert "--token-file" in str(refusal.value.fix)


def test_with_a_token_every_address_is_taken():
    address = listen("0.0.0.0", 0, has_token=True)
    with address.listener:
        assert not address.is_loopback
        assert address.listener.getsockname()[0] == "0.0.0.0"
        assert address.url == f"http://127.0.0.1:{address.port}"


def test_a_name_is_judged_by_its_address(monkeypatch):
    """A name says nothing: `localhost` may be anything in a hosts file."""
    where = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.7", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: where)
    with pytest.raises(UserError, match="without a token"):
        listen("localhost", 0, has_token=False)


def test_a_port_in_use_is_said_before_anything_is_loaded():
    first = listen("127.0.0.1", 0, has_token=False)
    with first.listener, pytest.raises(UserError, match=f"port {first.port} .* in use") as refusal:
        listen("127.0.0.1", first.port, has_token=False)
    assert "--port 0" in str(refusal.value.fix)


def test_an_address_of_nobody_is_said():
    with pytest.raises(UserError, match="not an address"):
        listen("no.such.host.invalid", 0, has_token=False)


def test_the_token_comes_from_a_file_or_the_variable(tmp_path, monkeypatch):
    monkeypatch.delenv("TUNEWELL_TOKEN", raising=False)
    assert read_token(None) is None
    monkeypatch.setenv("TUNEWELL_TOKEN", "from-the-environment")
    assert read_token(None) == "from-the-environment"
    (tmp_path / "token.txt").write_text("from-the-file-itself\n")
    assert read_token(tmp_path / "token.txt") == "from-the-file-itself"


@pytest.mark.parametrize("text", ["", "short", "two words that are long", "ümläutsümläutsümläuts", "a" * 15])
def test_a_token_that_is_none_is_refused_and_not_shown(tmp_path, monkeypatch, text):
    """An empty variable must not mean that everyone is let in."""
    (tmp_path / "token.txt").write_text(text, encoding="utf-8")
    monkeypatch.setenv("TUNEWELL_TOKEN", text)
    for file in (None, tmp_path / "token.txt"):
        with pytest.raises(UserError, match="at least 16") as refusal:
            read_token(file)
        assert not text or text not in str(refusal.value)


def test_a_token_file_that_is_not_there_is_said(tmp_path):
    with pytest.raises(UserError, match="cannot read the token"):
        read_token(tmp_path / "nothing")


def test_an_idle_server_ends_by_itself():
    """Guards against a model that stays in memory after the program that asked it is gone."""
    model = Letters()
    model.may_write.release(100)
    app = build_app(model, access=AccessRules())
    address = listen("127.0.0.1", 0, has_token=False)
    server = make_server(app, is_over=lambda: app.state.idle_seconds() > 2)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [address.listener]})
    thread.start()
    assert send(f"{address.url}/v1", chat(max_tokens=3))[0] == 200
    thread.join(timeout=20)
    assert not thread.is_alive()
