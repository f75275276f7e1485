"""Who may ask: programs of this machine, web pages that were named, and those who know the token."""

import hmac
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tunewell.core.errors import UserError
from tunewell.integrations.openai_errors import ApiError

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
