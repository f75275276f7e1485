"""Registries of extension points: data sources, training methods, optimizers, export targets.

A registry stores import paths as strings. Listing names for `--help`, the config schema or the docs imports nothing.
Plugins of other packages are listed after the implementations of this one.
"""

import importlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from tunewell.core.errors import UserError
from tunewell.core.plugins import Plugin, find_plugins


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


REGISTRIES: dict[str, "Registry[Any]"] = {}
"""The registries that read plugins, by the last part of their group of entry points."""


class Registry(Generic[E]):
    """All implementations of one extension point, in declaration order."""

    def __init__(self, kind: str, entries: Iterable[E], *, group: str = "", entry_type: type[Entry] = Entry) -> None:
        """Store the entries; `kind` is the singular noun for error messages, e.g. `training method`.

        `group` is the last part of the group of entry points; a registry without one has no plugins.
        """
        self.kind = kind
        self._entries = {entry.name: entry for entry in entries}
        self._group, self._entry_type = group, entry_type
        if group:
            REGISTRIES[group] = self

    def names(self) -> tuple[str, ...]:
        """Return the names in declaration order."""
        return (*self._entries, *self._plugins())

    def entries(self) -> list[E]:
        """Return all entries, without those of broken plugins."""
        found = list(self._entries.values())
        for plugin in self._plugins().values():
            with suppress(UserError):
                found.append(self.read(plugin))
        return found

    def doc(self, name: str) -> str:
        """Return one line about an entry. A plugin is named with its package, and not imported."""
        plugin = self._plugins().get(name)
        return f"of the package {plugin.package}" if plugin else self.entry(name).doc

    def load(self, name: str) -> Any:
        """Import the module of an entry and return the object at its import path."""
        entry, plugin = self.entry(name), self._plugins().get(name)
        return replace(plugin, path=entry.path).load() if plugin else load_path(entry.path)

    def entry(self, name: str) -> E:
        """Return an entry; raise UserError with the known names if the name is unknown."""
        if name in self._entries:
            return self._entries[name]
        if plugin := self._plugins().get(name):
            plugin.mark_used()
            return self.read(plugin)
        raise UserError(
            f"unknown {self.kind} `{name}`", fix="use one of: " + ", ".join(f"`{known}`" for known in self.names())
        )

    def add(self, entry: E) -> None:
        """Add an entry, or replace the entry with the same name."""
        self._entries[entry.name] = entry

    def read(self, plugin: Plugin) -> Any:
        """Return the entry of a plugin, made from its class or function if it has none; raise UserError if broken."""
        found = plugin.load()
        if isinstance(found, self._entry_type):
            return replace(found, name=plugin.name)
        doc = (getattr(found, "__doc__", None) or "").strip().partition("\n")[0]
        try:
            return self._entry_type(plugin.name, doc, plugin.path)
        except TypeError as error:  # the entry type needs more than a name, a line and a path
            raise plugin.broken(f"`{plugin.path}` must be a `{self._entry_type.__name__}`") from error

    def _plugins(self) -> dict[str, Plugin]:
        found = find_plugins(self._group) if self._group else []
        return {plugin.name: plugin for plugin in found if plugin.name not in self._entries}
