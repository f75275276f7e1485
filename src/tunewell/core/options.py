"""How the options of a command are declared: `seed: Annotated[int, Option("Random seed.", "N")] = 0`.

A field of a dataclass or a parameter of a command's function is declared once. The command line is made from it, and
nothing here imports typer, so that workflows and the library can use the same dataclass.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Option:
    """An option of a command. Its flag is the name of the field, unless `flags` names others."""

    help: str = ""
    metavar: str | None = None
    flags: tuple[str, ...] = ()
    min: float | None = None
    max: float | None = None
    hidden: bool = False
    is_last: bool = False
    """Whether the help lists it at the end: an option of many commands."""
    is_rare: bool = False
    """Whether only `--help --all` shows it."""
    kind: Any = None
    """The type on the command line, if the library takes others too."""


class Argument(Option):
    """An argument of a command, named by its place."""


@dataclass(frozen=True, kw_only=True)
class WeightsOptions:
    """Options of all functions that load the weights of a model. The options of commands inherit them."""

    allow_pickle: bool = False
    """Whether to load `.pt` and `.bin` files, which can run code."""


SAFE_WEIGHTS = WeightsOptions()
