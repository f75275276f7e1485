"""Access control of a local web server: listening address, token and allowed web origins."""

import asyncio
import hmac
import ipaddress
import os
import re
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import uvicorn
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tunewell.core.errors import UserError
from tunewell.core.files import read_text
from tunewell.web.connections import BACKLOG, LimitedProtocol, WaitingConnections
from tunewell.web.errors import ApiError

TOKEN_VARIABLE = "TUNEWELL_TOKEN"
_MIN_TOKEN_CHARS = 16
"""Minimum length of the token; shorter tokens could be guessed."""
_MAKE_TOKEN = 'python -c "import secrets; print(secrets.token_urlsafe(32))" > token.txt'
_SHUTDOWN_SECONDS = 5
"""Grace period for running answers when the server stops."""
_HOST = re.compile(r"(?:(?P<name>[a-z0-9._-]+)|\[(?P<ipv6>[0-9a-f:.]+)\])(?::[0-9]{1,5})?")
"""A host and a port, nothing else: URL parsers also accept a user name, which other programs may take for the host."""
_LOOPBACK_NAMES = {"localhost", "127.0.0.1", "::1"}


class BrowserGuard:
    """Middleware that rejects requests from web pages: cross-origin requests and DNS rebinding.

    A page in a browser can send requests to loopback addresses. The browser sends the page's origin in `Origin` and
    the host name of the URL in `Host`.
    """

    def __init__(
        self, app: ASGIApp, *, host: str, checks_host: bool, origins: Iterable[str] = (), has_pages: bool = False
    ) -> None:
        """Accept requests from these origins, and with `has_pages` from pages of this server."""
        self._app = app
        self._hosts = {*_LOOPBACK_NAMES, host.lower()} if checks_host else None
        self._origins = frozenset(origins)
        self._has_pages = has_pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request to the app, or reject it."""
        error = self._check(Headers(scope=scope)) if scope["type"] == "http" else None
        await (self._app if error is None else error.response())(scope, receive, send)

    def _check(self, headers: Headers) -> ApiError | None:
        if self._hosts is not None and _host_name(headers.get("host", "")) not in self._hosts:
            return ApiError(403, "this server accepts requests to `localhost` only", code="host_not_allowed")
        origin = headers.get("origin")
        # Some requests from pages, such as those for images, have this header instead of `Origin`.
        is_from_page = origin is not None or headers.get("sec-fetch-site", "none") in ("cross-site", "same-site")
        # A link to a page of this server, also in a file, is such a request without `Origin`. It sends no token.
        if self._has_pages and origin is None and headers.get("sec-fetch-mode") == "navigate":
            return None
        is_own = self._has_pages and origin in (f"http://{headers.get('host')}", f"https://{headers.get('host')}")
        if is_from_page and not is_own and origin not in self._origins:
            fix = "" if self._has_pages else "; allow its origin with `--allow-origin`"
            return ApiError(403, f"requests from this web page are not allowed{fix}", code="origin_not_allowed")
        return None


class TokenGuard:
    """Middleware that requires the token below a path; tokens are compared in constant time."""

    def __init__(self, app: ASGIApp, *, token: str, path: str = "/") -> None:
        self._app = app
        self._expected = f"bearer {token}".encode()
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request to the app, or reject it."""
        app = self._app
        if scope["type"] == "http" and scope["path"].startswith(self._path):
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
    """Return the host name in a `Host` header without its port, or None if the header is invalid."""
    found = _HOST.fullmatch(host.lower())
    return (found["name"] or found["ipv6"]) if found else None


@dataclass(frozen=True)
class ListeningAddress:
    """The address of the server and its open socket."""

    listener: socket.socket
    host: str
    """The IP address on which the server listens."""
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        return ipaddress.ip_address(self.host).is_loopback

    @property
    def url(self) -> str:
        """The URL for clients on this machine, without a path."""
        address = ipaddress.ip_address(self.host)
        shown = "127.0.0.1" if address.is_unspecified else self.host
        return f"http://[{shown}]:{self.port}" if ":" in shown else f"http://{shown}:{self.port}"


def read_token(file: Path | None) -> str | None:
    """Return the token from a file or from `TUNEWELL_TOKEN`, or None; raise UserError for an invalid token."""
    if file is None:
        where, token = f"the environment variable `{TOKEN_VARIABLE}`", os.environ.get(TOKEN_VARIABLE)
        if token is None:
            return None
    else:
        where = f"`{file}`"
        try:
            token = read_text(file)
        except (OSError, ValueError) as error:
            raise UserError("cannot read the token", where=f"{where}: {error}", fix=_MAKE_TOKEN) from error
    token = token.strip()
    if not (token.isascii() and token.isprintable()) or " " in token or len(token) < _MIN_TOKEN_CHARS:
        raise UserError(
            f"the token must be one word of at least {_MIN_TOKEN_CHARS} ASCII characters", where=where, fix=_MAKE_TOKEN
        )
    return token


def listen(host: str, port: int, *, has_token: bool, what: str = "use this model") -> ListeningAddress:
    """Listen on a port, or on a free port if it is 0; raise UserError for a public address without a token.

    `what` is what anyone could do without a token.
    """
    family, address = _resolve(host, port)
    # The checked address is also the bound address: a second lookup of the name could return a different one.
    if not (has_token or ipaddress.ip_address(address[0]).is_loopback):
        raise UserError(
            f"without a token, anyone on the network could {what} through `{host}`",
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
            fix="choose another port with `--port`; `--port 0` chooses a free port",
        ) from error
    return ListeningAddress(listener, address[0], listener.getsockname()[1])


class _EndingServer(uvicorn.Server):
    """A server that asks several times a second whether it shall end."""

    is_over: Callable[[], bool]

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self.is_over()


def make_server(app: ASGIApp, *, is_over: Callable[[], bool] = lambda: False) -> uvicorn.Server:
    """Return a uvicorn server for the app, which the caller runs on an open socket. It ends when `is_over`."""
    config = uvicorn.Config(
        app,
        # Use the tested implementations, whatever else is installed.
        http=cast(type[asyncio.Protocol], partial(LimitedProtocol, WaitingConnections())),
        loop="asyncio",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        # Otherwise a client could fake its address in a header.
        proxy_headers=False,
        backlog=BACKLOG,
        # Below this level there is one line for every request that is not valid HTTP.
        log_level="error",
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
    )
    server = _EndingServer(config)
    server.is_over = is_over
    return server


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Return the address of a host, preferably IPv4; raise UserError if the name cannot be resolved."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UserError(f"`{host}` is not an address of this machine: {error}", fix="leave out `--host`") from error
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, (str(address[0]), port)
