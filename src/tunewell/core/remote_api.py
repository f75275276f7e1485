"""Send requests to an OpenAI-compatible server that the user named: `http://HOST/v1#MODEL`.

The answers are not trusted: their size and time are limited. A redirect is an error, because it would send the texts
and the key to another server.
"""

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from tunewell.core.errors import UserError
from tunewell.core.units import duration, size_bytes

MAX_LINE_BYTES = 1 << 20
MAX_ANSWER_BYTES = 64 << 20
"""Maximum size of an answer: 64 vectors of 16,384 numbers are 20 MiB of JSON."""
_BLOCK_BYTES = 1 << 16


_BUSY = frozenset({408, 429, 500, 502, 503, 504, 529})
"""Statuses of a server that may answer the same request later."""


class Unavailable(UserError):
    """A server that may answer the same request later; `wait_seconds` is how long it asks to wait, if it says so."""

    wait_seconds: float | None = None


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """Turns a redirect into an error."""

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any) -> None:
        return None


class RemoteApi:
    """The address of a server and a model; `what` names the server in errors."""

    def __init__(
        self, address: str, *, what: str, key_variable: str, silence_seconds: float = 300, key: str | None = None
    ) -> None:
        """Split and check the address. Nothing is sent. Without a `key`, that of the environment variable is sent."""
        self.url, _, self.model = address.partition("#")
        if not self.model:
            raise UserError(f"`{address}` does not name a model", fix=f"add it to the address: `{address}#MODEL`")
        if urlsplit(self.url).scheme not in ("http", "https"):
            raise UserError(
                f"`{self.url}` is not an address of a server", fix="write it like `http://HOST:8080/v1#MODEL`"
            )
        if "@" in urlsplit(self.url).netloc or "?" in self.url:
            raise UserError(
                f"the address `{self.url}` contains a password or a query",
                fix=f"remove it; a key is read from {key_variable}",
            )
        self._key = key
        self._what, self._key_variable, self._silence_seconds = what, key_variable, silence_seconds
        self._opener = urllib.request.build_opener(NoRedirects)

    def lines(self, path: str, body: dict[str, Any]) -> Iterator[bytes]:
        """Send a request and yield the lines of the answer as they arrive; raise UserError if the server fails."""
        num_bytes = 0
        with self._post(path, body) as response:
            while line := response.readline(MAX_LINE_BYTES + 1):
                num_bytes += len(line)
                if len(line) > MAX_LINE_BYTES:
                    raise self._invalid(f"a line of the answer is larger than {size_bytes(MAX_LINE_BYTES)}")
                if num_bytes > MAX_ANSWER_BYTES:
                    raise self._invalid(f"the answer is larger than {size_bytes(MAX_ANSWER_BYTES)}")
                yield line

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        """Send a request and return the JSON of the whole answer; raise UserError if the server fails."""
        data, deadline = bytearray(), time.monotonic() + self._silence_seconds
        with self._post(path, body) as response:
            while block := response.read1(_BLOCK_BYTES):
                data += block
                if len(data) > MAX_ANSWER_BYTES:
                    raise self._invalid(f"the answer is larger than {size_bytes(MAX_ANSWER_BYTES)}")
                if time.monotonic() > deadline:
                    raise self._invalid(f"the answer was not complete after {self._silence_seconds:g} seconds")
        return self.parse(bytes(data))

    def parse(self, data: bytes) -> Any:
        """Parse JSON of the server; raise UserError if it is not valid."""
        try:
            return json.loads(data.decode("utf-8", "replace"))
        except (ValueError, RecursionError) as error:
            raise self._invalid("it is not valid JSON") from error

    def invalid_format(self) -> UserError:
        """Return the error for JSON that does not have the format of the API."""
        return self._invalid("it is not in the format of OpenAI's API")

    @contextmanager
    def _post(self, path: str, body: dict[str, Any]) -> Generator[Any]:
        headers = {"Content-Type": "application/json"}
        if key := self._key or os.environ.get(self._key_variable):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(f"{self.url.rstrip('/')}/{path}", json.dumps(body).encode(), headers)
        try:
            with self._opener.open(request, timeout=self._silence_seconds) as response:
                yield response
        except urllib.error.HTTPError as error:
            with error:
                detail = error.read(500).decode("utf-8", "replace")
            target = error.headers.get("Location")
            if target and 300 <= error.code < 400:
                raise UserError(
                    f"{self._what} redirects to another address; redirects are not followed",
                    where=f"{self.url} -> {target[:200]}",
                    fix="if you trust that address, use it instead",
                ) from None
            after = error.headers.get("Retry-After", "")
            wait = float(after) if after.isdecimal() else None
            later = f"; the next try is in {duration(wait)}" if wait else ""
            rejected = (Unavailable if error.code in _BUSY else UserError)(
                f"{self._what} rejected the request: status {error.code}{later}",
                where=detail or self.url,
                fix=f"check the name of the model after `#`; a key is read from {self._key_variable}",
            )
            if isinstance(rejected, Unavailable):
                rejected.wait_seconds = wait
            raise rejected from None
        except (OSError, ValueError) as error:
            fix = f"check the address; a key is read from {self._key_variable}"
            reason = getattr(error, "reason", error)
            raise Unavailable(f"{self._what} does not answer: {reason}", where=self.url, fix=fix) from None
        except http.client.HTTPException as error:
            raise self._invalid(f"it is not valid HTTP ({type(error).__name__})") from None

    def _invalid(self, why: str) -> UserError:
        fix = "use the address of the API, such as `http://localhost:8080/v1#MODEL`"
        return UserError(f"the answer of {self._what} cannot be used: {why}", where=self.url, fix=fix)
