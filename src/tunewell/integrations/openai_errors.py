"""Errors in the shape that OpenAI's clients read."""

from typing import Any

from starlette.responses import JSONResponse

INVALID, SERVER = "invalid_request_error", "server_error"


class ApiError(Exception):
    """A request that is not answered: why, which parameter is at fault, and the code that programs look at."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body: dict[str, Any] = {
            "error": {
                "message": message,
                "type": INVALID if status < 500 else SERVER,
                "param": param,
                "code": code,
            }
        }

    def response(self) -> JSONResponse:
        """Give the answer that says so."""
        headers = {"WWW-Authenticate": "Bearer"} if self.status == 401 else None
        return JSONResponse(self.body, self.status, headers)
