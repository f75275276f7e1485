"""Errors that a person can mend."""


class UserError(Exception):
    """Say what is wrong, where, and how to mend it; shown without a traceback, exit code 2.

    Everything else that is raised is a bug or the machine's fault.
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
    """An error that all processes of a training end with together; of those on one machine the first tells it."""
