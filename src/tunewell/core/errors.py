"""Errors that the user can correct."""

from collections.abc import Iterable

from tunewell.core.redact import redact


class UserError(Exception):
    """An error with its location and a fix. It is printed without a traceback or secrets, and the exit code is 2."""

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.fix:
            lines.append(f"  fix:   {self.fix}")
        return redact("\n".join(lines))


class SharedError(UserError):
    """Raised on every rank of a distributed run; printed once per host."""


def did_you_mean(guesses: Iterable[str], otherwise: str) -> str:
    """Return the fix for an unknown name: the closest known names, or `otherwise` if there are no guesses."""
    names = " or ".join(f"`{guess}`" for guess in guesses)
    return f"did you mean {names}?" if names else otherwise
