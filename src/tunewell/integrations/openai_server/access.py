"""Who may ask: programs of this machine, web pages that were named, and those who know the token."""

import hmac
import ipaddress
import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import uvicorn
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tunewell.core.errors import UserError
from tunewell.integrations.openai_server.requests import ApiError

_OWN_NAMES = {"localhost", "127.0.0.1", "::1"}


class BrowserGuard:
    """Turns web pages away: those of other origins, and those that had their own name point to this machine.

    A page in a browser can send requests to loopback addresses. Browsers name the page in `Origin`, and the name it
    was reached by in `Host`.
    """

    def __init__(self, app: ASGIApp, *, host: str, origins: Iterable[str], checks_host: bool) -> None:
        self._app = app
        self._names = {*_OWN_NAMES, host.lower()} if checks_host else None
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        refusal = self._refusal(Headers(scope=scope)) if scope["type"] == "http" else None
        await (self._app if refusal is None else refusal.response())(scope, receive, send)

    def _refusal(self, headers: Headers) -> ApiError | None:
        if self._names is not None and _name_in(headers.get("host", "")) not in self._names:
            return ApiError(403, "this server is reached as `localhost` only", code="host_not_allowed")
        origin = headers.get("origin")
        # Some requests of pages, such as those for pictures, carry no origin but are marked.
        is_of_page = origin is not None or headers.get("sec-fetch-site", "none") in ("cross-site", "same-site")
        if is_of_page and origin not in self._origins:
            message = "web pages may not ask this server; `--allow-origin` names those that may"
            return ApiError(403, message, code="origin_not_allowed")
        return None


class TokenGuard:
    """Asks for the token, compared in a time that does not tell how much of it was right."""

    def __init__(self, app: ASGIApp, *, token: str) -> None:
        self._app = app
        self._expected = f"bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        is_known = scope["type"] != "http" or self._knows(Headers(scope=scope).get("authorization", ""))
        refusal = ApiError(401, "the token is missing or wrong", code="invalid_api_key")
        await (self._app if is_known else refusal.response())(scope, receive, send)

    def _knows(self, header: str) -> bool:
        scheme, _, token = header.partition(" ")
        return hmac.compare_digest(f"{scheme.lower()} {token.strip()}".encode(), self._expected)


def check_origin(origin: str) -> str:
    """Check that an origin is one as browsers write it; raise UserError."""
    parts = urlsplit(origin)
    if parts.scheme in ("http", "https") and parts.hostname and origin == f"{parts.scheme}://{parts.netloc}".lower():
        return origin
    raise UserError(
        f"`{origin}` is no origin of web pages", fix="name one, such as `--allow-origin http://localhost:3000`"
    )


def _name_in(host: str) -> str | None:
    """Take the port off a `Host` header; None for what is none."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


# Where to listen: on this machine only, unless a token keeps strangers out; and uvicorn, which does the listening.

TOKEN_VARIABLE = "TUNEWELL_TOKEN"
_LEAST_TOKEN_CHARS = 16
"""Shorter ones can be guessed by trying."""
_MAKE_TOKEN = 'python -c "import secrets; print(secrets.token_urlsafe(32))" > token.txt'
_MAX_CONNECTIONS = 128
"""Each that waits holds a request in memory; beyond, clients are told to come back."""
_LAST_WORDS_SECONDS = 5
"""What an answer that is being written gets when the server is asked to stop."""


@dataclass(frozen=True)
class Address:
    """Where clients find the server."""

    listener: socket.socket
    host: str
    """The address it listens on, in numbers."""
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return ipaddress.ip_address(self.host).is_loopback

    @property
    def url(self) -> str:
        """What clients take as the base URL; one that works on this machine."""
        address = ipaddress.ip_address(self.host)
        shown = "127.0.0.1" if address.is_unspecified else self.host
        return f"http://[{shown}]:{self.port}/v1" if ":" in shown else f"http://{shown}:{self.port}/v1"


def read_token(file: Path | None) -> str | None:
    """Take the token from a file or from `TUNEWELL_TOKEN`; None where there is neither."""
    if file is None:
        where, token = f"the variable `{TOKEN_VARIABLE}`", os.environ.get(TOKEN_VARIABLE)
        if token is None:
            return None
    else:
        where = f"`{file}`"
        try:
            token = file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError("the token cannot be read", where=f"{where}: {error}", fix=_MAKE_TOKEN) from error
    token = token.strip()
    if not (token.isascii() and token.isprintable()) or " " in token or len(token) < _LEAST_TOKEN_CHARS:
        raise UserError(
            f"a token is one word of at least {_LEAST_TOKEN_CHARS} letters and digits", where=where, fix=_MAKE_TOKEN
        )
    return token


def listen(host: str, port: int, *, has_token: bool) -> Address:
    """Open a port, 0 for any that is free; raise UserError for one that strangers could reach without a token."""
    family, place = _resolve(host, port)
    # What was looked at is what is bound: a name could be another address the next time it is asked for.
    if not (has_token or ipaddress.ip_address(place[0]).is_loopback):
        raise UserError(
            f"without a token, `{host}` would let anyone on the network use this model",
            fix=f"leave `--host` out, or make a token ({_MAKE_TOKEN}) and add `--token-file token.txt`",
        )
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen()
    except OSError as error:
        listener.close()
        raise UserError(
            f"port {port} of `{host}` cannot be used: {(error.strerror or str(error)).lower()}",
            fix="choose another with `--port`, or `--port 0` for any that is free",
        ) from error
    return Address(listener, place[0], listener.getsockname()[1])


def make_server(app: ASGIApp) -> uvicorn.Server:
    """Make the server that answers requests, ready to be run on a listener."""
    config = uvicorn.Config(
        app,
        # What is named here is what was tried, whatever else is installed.
        http="h11",
        loop="asyncio",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        # Otherwise a header could say where a request comes from.
        proxy_headers=False,
        limit_concurrency=_MAX_CONNECTIONS,
        timeout_graceful_shutdown=_LAST_WORDS_SECONDS,
    )
    return uvicorn.Server(config)


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Find the address of a host; where it has several, the first of the older kind, which every client knows."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UserError(f"`{host}` is no address of this machine: {error}", fix="leave `--host` out") from error
    family, _, _, _, place = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, (str(place[0]), port)
