"""Errors of the page's API: a UserError with a code and an HTTP status."""

from typing import Any

from tunewell.core.errors import UserError

STATUS = {"refused": 400, "read_only": 403, "outside": 403, "not_found": 404, "busy": 409, "too_large": 413}
STATUS |= {"media_type": 415, "failed": 500, "feature": 501, "disk_full": 507}


class WatchError(UserError):
    """A UserError with a code, by which the page decides what to offer."""

    def __init__(self, code: str, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        super().__init__(what, where=where, fix=fix)
        self.code = code


def error_json(error: UserError) -> dict[str, Any]:
    """Return the object that the page shows."""
    code = getattr(error, "code", "refused")
    return {"error": {"code": code, "what": error.what, "where": error.where, "fix": error.fix}}
