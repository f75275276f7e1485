"""Errors of a web server, in the format of OpenAI's API."""

from typing import Any

from starlette.responses import JSONResponse

_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "1"}}


class ApiError(Exception):
    """An error in OpenAI's format: message, type, parameter and code."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> JSONResponse:
        """Return the HTTP response."""
        return JSONResponse(self.body, self.status, _HEADERS.get(self.status))
