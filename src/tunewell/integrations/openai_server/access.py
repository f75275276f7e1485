"""Access control of the OpenAI server: listening address, API token, and which web pages may send requests."""

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

TOKEN_VARIABLE = "TUNEWELL_TOKEN"
_MIN_TOKEN_CHARS = 16
"""Shorter tokens could be guessed."""
_MAKE_TOKEN = 'python -c "import secrets; print(secrets.token_urlsafe(32))" > token.txt'
_MAX_CONNECTIONS = 128
"""A waiting connection holds its request in memory; above the limit clients get a 503."""
_SHUTDOWN_SECONDS = 5
"""Time that running answers get when the server stops."""
_LOOPBACK_NAMES = {"localhost", "127.0.0.1", "::1"}


class BrowserGuard:
    """Rejects requests of web pages: cross-origin requests and DNS rebinding.

    A page in a browser can send requests to loopback addresses. The browser sends the page's origin in `Origin` and
    the host name of the URL in `Host`.
    """

    def __init__(self, app: ASGIApp, *, host: str, origins: Iterable[str], checks_host: bool) -> None:
        self._app = app
        self._hosts = {*_LOOPBACK_NAMES, host.lower()} if checks_host else None
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or reject it."""
        error = self._check(Headers(scope=scope)) if scope["type"] == "http" else None
        await (self._app if error is None else error.response())(scope, receive, send)

    def _check(self, headers: Headers) -> ApiError | None:
        if self._hosts is not None and _host_name(headers.get("host", "")) not in self._hosts:
            return ApiError(403, "this server answers requests to `localhost` only", code="host_not_allowed")
        origin = headers.get("origin")
        # Some requests of pages, such as those for images, have no `Origin` but this header.
        is_from_page = origin is not None or headers.get("sec-fetch-site", "none") in ("cross-site", "same-site")
        if is_from_page and origin not in self._origins:
            message = "web pages may not use this server; allow one with `--allow-origin`"
            return ApiError(403, message, code="origin_not_allowed")
        return None


class TokenGuard:
    """Requires the token in every request; it is compared in constant time."""

    def __init__(self, app: ASGIApp, *, token: str) -> None:
        self._app = app
        self._expected = f"bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or reject it."""
        app = self._app
        if scope["type"] == "http":
            scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
            if not hmac.compare_digest(f"{scheme.lower()} {token.strip()}".encode(), self._expected):
                app = ApiError(401, "the token is missing or wrong", code="invalid_api_key").response()
        await app(scope, receive, send)


def check_origin(origin: str) -> str:
    """Return a web origin as browsers write it, such as `http://localhost:3000`; raise UserError for anything else."""
    parts = urlsplit(origin)
    if parts.scheme in ("http", "https") and parts.hostname and origin == f"{parts.scheme}://{parts.netloc}".lower():
        return origin
    raise UserError(f"`{origin}` is not a valid web origin", fix="write it like `--allow-origin http://localhost:3000`")


def _host_name(host: str) -> str | None:
    """Return the host of a `Host` header without its port; None if the header is invalid."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


@dataclass(frozen=True)
class Address:
    """The address of the server and its open socket."""

    listener: socket.socket
    host: str
    """The numeric address it listens on."""
    port: int

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can connect."""
        return ipaddress.ip_address(self.host).is_loopback

    @property
    def url(self) -> str:
        """The base URL for clients on this machine."""
        address = ipaddress.ip_address(self.host)
        shown = "127.0.0.1" if address.is_unspecified else self.host
        return f"http://[{shown}]:{self.port}/v1" if ":" in shown else f"http://{shown}:{self.port}/v1"


def read_token(file: Path | None) -> str | None:
    """Return the token from a file or from `TUNEWELL_TOKEN`; None if neither is set. Raises UserError."""
    if file is None:
        where, token = f"the environment variable `{TOKEN_VARIABLE}`", os.environ.get(TOKEN_VARIABLE)
        if token is None:
            return None
    else:
        where = f"`{file}`"
        try:
            token = file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError("cannot read the token", where=f"{where}: {error}", fix=_MAKE_TOKEN) from error
    token = token.strip()
    if not (token.isascii() and token.isprintable()) or " " in token or len(token) < _MIN_TOKEN_CHARS:
        raise UserError(
            f"the token must be one word of at least {_MIN_TOKEN_CHARS} ASCII characters", where=where, fix=_MAKE_TOKEN
        )
    return token


def listen(host: str, port: int, *, has_token: bool) -> Address:
    """Open a port; 0 chooses a free one. Raises UserError for a public address without a token."""
    family, address = _resolve(host, port)
    # Check and bind the same address: a second lookup of the name could return another one.
    if not (has_token or ipaddress.ip_address(address[0]).is_loopback):
        raise UserError(
            f"without a token, anyone on the network could use this model through `{host}`",
            fix=f"leave out `--host`, or create a token ({_MAKE_TOKEN}) and add `--token-file token.txt`",
        )
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        listener.close()
        raise UserError(
            f"cannot listen on port {port} of `{host}`: {(error.strerror or str(error)).lower()}",
            fix="choose another port with `--port`; `--port 0` takes a free one",
        ) from error
    return Address(listener, address[0], listener.getsockname()[1])


def make_server(app: ASGIApp) -> uvicorn.Server:
    """Return a uvicorn server for the app, to be run on an open socket."""
    config = uvicorn.Config(
        app,
        # Fixed to the tested implementations, whatever else is installed.
        http="h11",
        loop="asyncio",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        # Otherwise a client could fake its address in a header.
        proxy_headers=False,
        limit_concurrency=_MAX_CONNECTIONS,
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
    )
    return uvicorn.Server(config)


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Return the address of a host, IPv4 if it has one; raise UserError if there is none."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UserError(f"`{host}` is not an address of this machine: {error}", fix="leave out `--host`") from error
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, (str(address[0]), port)
