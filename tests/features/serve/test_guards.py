"""Who may ask: this machine, pages that were named, and whoever knows the token."""

import http.client
from urllib.parse import urlsplit

import openai
import pytest
from serving import Letters, chat, client_of, send, served

from tunewell.core.errors import UserError
from tunewell.features.serve.server import AccessRules
from tunewell.web.access import check_origin

TOKEN = "a-token-that-nobody-guesses"
PAGE = "http://localhost:3000"


class Ready(Letters):
    """A model that writes at once."""

    def __init__(self) -> None:
        super().__init__()
        self.may_write.release(1000)


@pytest.fixture(scope="module")
def home():
    with served(Ready()) as url:
        yield url


@pytest.fixture(scope="module")
def locked():
    with served(Ready(), AccessRules(token=TOKEN)) as url:
        yield url


@pytest.fixture(scope="module")
def paged():
    with served(Ready(), AccessRules(token=TOKEN, origins=[PAGE])) as url:
        yield url


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000", "[::1]"])
def test_this_machine_is_known_by_its_own_names(home, host):
    assert send(home, chat(max_tokens=1), host=host)[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.nip.io", "", "[", "::1]", "@x"]
)
def test_a_name_that_points_here_is_refused(home, host):
    """A page of `evil.example` may have its name point to 127.0.0.1, and is then of the same origin as this server."""
    status, answer = send(home, chat(max_tokens=1), host=host)
    assert status in (400, 403) and (status == 400 or answer["error"]["code"] == "host_not_allowed")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("origin", "https://evil.example"),
        ("origin", "null"),
        ("origin", PAGE),
        ("sec_fetch_site", "cross-site"),
        ("sec_fetch_site", "same-site"),
    ],
)
def test_web_pages_are_refused(home, name, value):
    """Any page in a browser can send requests to this machine, even if it cannot read the answers."""
    for path, method in (("/v1/chat/completions", "POST"), ("/v1/models", "GET"), ("/health", "GET")):
        status, answer = send(home, chat(max_tokens=1), path, method=method, **{name: value})
        assert (status, answer["error"]["code"]) == (403, "origin_not_allowed")


def test_no_answer_invites_web_pages(home):
    """Without these headers a browser keeps the answer from the page."""
    assert not [name for name in headers_of(home, origin="https://evil.example") if name.startswith("access-control")]
    assert not [name for name in headers_of(home) if name.startswith("access-control")]


def test_a_page_that_was_named_may_ask(paged):
    asked = {"origin": PAGE, "access_control_request_method": "POST", "access_control_request_headers": "authorization"}
    preflight = headers_of(paged, method="OPTIONS", path="/v1/chat/completions", **asked)
    assert preflight["access-control-allow-origin"] == PAGE
    answer = headers_of(paged, origin=PAGE, authorization=f"Bearer {TOKEN}")
    assert answer["access-control-allow-origin"] == PAGE
    assert send(paged, chat(max_tokens=1), origin=PAGE, authorization=f"Bearer {TOKEN}")[0] == 200
    assert send(paged, chat(), origin=PAGE)[0] == 401
    assert send(paged, chat(), origin=f"{PAGE}1", authorization=f"Bearer {TOKEN}")[0] == 403


def test_who_knows_the_token_is_answered(locked):
    answer = client_of(locked, TOKEN).chat.completions.create(**chat(max_tokens=3))
    assert answer.choices[0].message.content == "abc"
    # The names of a proxy or another machine are fine then.
    assert send(locked, chat(max_tokens=1), host="model.example", authorization=f"bearer {TOKEN}")[0] == 200


def test_who_does_not_know_it_is_not(locked):
    with pytest.raises(openai.AuthenticationError) as refusal:
        client_of(locked, TOKEN[:-1]).chat.completions.create(**chat())
    assert refusal.value.code == "invalid_api_key"
    for header in (
        "",
        "Bearer",
        "Bearer ",
        f"Basic {TOKEN}",
        TOKEN,
        f"Bearer {TOKEN} x",
        f"Bearer {TOKEN}é",
        "Bearer é",
    ):
        assert send(locked, chat(), authorization=header)[0] == 401, header


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/", "/nothing"])
def test_without_the_token_nothing_at_all_is_told(locked, path):
    assert send(locked, None, path, method="GET")[0] == 401


def test_an_origin_is_written_as_browsers_do():
    assert check_origin("https://chat.example:8443") == "https://chat.example:8443"
    for text in ("*", "localhost:3000", "http://a.example/", "HTTP://a.example", "file://x", "null", ""):
        with pytest.raises(UserError, match="not a valid web origin"):
            check_origin(text)


def headers_of(url: str, *, method: str = "GET", path: str = "/v1/models", **headers: str) -> dict[str, str]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=20)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        return {name.lower(): value for name, value in connection.getresponse().getheaders()}
    finally:
        connection.close()
