"""Errors that the user can correct."""

import difflib
from collections.abc import Iterable, Mapping, Sequence

from tunewell.core.redact import redact


class UserError(Exception):
    """An error with its location and a fix. It is printed without a traceback or secrets, and the exit code is 2."""

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        fix: str | None = None,
        problems: Sequence[Mapping[str, str | None]] = (),
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.fix = fix
        self.problems = problems
        """Each problem of a config with its `what`, `where` and `fix`, for `--json`."""

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.fix:
            lines.append(f"  fix:   {self.fix}")
        return redact("\n".join(lines))


class SharedError(UserError):
    """Raised on every rank of a distributed run; printed once per host."""


_MIN_SIMILARITY = 0.8
"""Similarity (difflib's ratio) of two names that differ by a typo: one letter in five missing, added or swapped."""
_MIN_LETTERS = 3
"""Letters of an abbreviation that stands for one name only: `eval` for `evaluate`."""


def close_names(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names that a misspelled or abbreviated name stands for, best first; none if in doubt."""
    names = list(known)
    longer = [other for other in names if other.startswith(name) and len(name) >= _MIN_LETTERS]
    return difflib.get_close_matches(name, names, 1, _MIN_SIMILARITY) or (longer if len(longer) == 1 else [])


def did_you_mean(guesses: Iterable[str], otherwise: str) -> str:
    """Return the fix for an unknown name: the closest known names, or `otherwise` if there are no guesses."""
    names = " or ".join(f"`{guess}`" for guess in guesses)
    return f"did you mean {names}?" if names else otherwise
