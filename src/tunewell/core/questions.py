"""Questions to the user: what a command asks in a terminal when it cannot tell by itself."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class MenuQuestion:
    """A question with numbered options."""

    text: str
    options: tuple[tuple[str, str], ...]
    """Each value and its description, the likeliest first."""
    shown: tuple[tuple[str, str], ...] = ()
    """Facts that help to answer, like the first row: a name and a text each."""


Asker = Callable[[MenuQuestion], str | None]
"""Returns the value of the chosen option, or None if there is no answer, as at the end of the input."""
