"""Registries of extension points: data sources, training methods, optimizers, export targets.

A registry stores import paths as strings. Listing names for `--help`, the config schema or the docs imports nothing.
"""

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tunewell.core.errors import UserError


@dataclass(frozen=True)
class Entry:
    """One implementation of an extension point."""

    name: str
    doc: str
    """One line for `--help` and the docs."""
    path: str
    """Import path of the class or function: `package.module:Name`."""


def load_path(path: str) -> Any:
    """Import the module of an import path, `module:name`, and return the object."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


E = TypeVar("E", bound=Entry)


class Registry(Generic[E]):
    """All implementations of one extension point, in declaration order."""

    def __init__(self, kind: str, entries: Iterable[E]) -> None:
        """Store the entries; `kind` is the singular noun for error messages, e.g. `training method`."""
        self.kind = kind
        self._entries = {entry.name: entry for entry in entries}

    def names(self) -> tuple[str, ...]:
        """Return the names in declaration order."""
        return tuple(self._entries)

    def load(self, name: str) -> Any:
        """Import the module of an entry and return the object at its import path."""
        return load_path(self.entry(name).path)

    def entry(self, name: str) -> E:
        """Return an entry; raise UserError with the known names if the name is unknown."""
        if name in self._entries:
            return self._entries[name]
        raise UserError(
            f"unknown {self.kind} `{name}`", fix="use one of: " + ", ".join(f"`{known}`" for known in self._entries)
        )

    def add(self, entry: E) -> None:
        """Add an entry, or replace the entry with the same name."""
        self._entries[entry.name] = entry
