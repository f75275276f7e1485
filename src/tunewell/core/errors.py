"""Errors that the user can correct."""


class UserError(Exception):
    """An error that the user can correct: what is wrong, where, and how to fix it.

    It is printed without a traceback and ends a command with exit code 2. Any other exception is a bug or a fault of
    the machine.
    """

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
        return "\n".join(lines)


class SharedError(UserError):
    """Raised on every rank of a distributed run; printed once per host."""
