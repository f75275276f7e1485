"""Plugins: extensions in other installed packages, found through their entry points.

    [project.entry-points."tunewell.optimizers"]
    descent = "my_package.extensions:DESCENT"        # an entry of the registry, or the class or function itself

A scan of the installed packages takes 55 ms, so its result is cached until a folder of `sys.path` changes. The variable
TUNEWELL_PLUGINS=0 switches all plugins off. Listing their names imports nothing.
"""

import importlib
import importlib.metadata
import os
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tunewell.core.cache import DiskCache
from tunewell.core.errors import UserError
from tunewell.core.files import sha256_text

_PREFIX = "tunewell."
_SWITCH = "TUNEWELL_PLUGINS"
_found: dict[tuple[str, ...], "list[Plugin]"] = {}
"""The plugins by `sys.path`."""
_used: set[str] = set()


@dataclass(frozen=True)
class Plugin:
    """One entry point of an installed package."""

    group: str
    """The extension point: `optimizers`."""
    name: str
    path: str
    """`module:name`, or a module."""
    package: str
    """The distribution with its version: `my-package 1.2`."""
    folder: str
    """Where it is installed."""

    def __str__(self) -> str:
        return f"{self.group}: {self.name} ({self.package})"

    def load(self) -> Any:
        """Return the object of the entry point; raise UserError, which names the plugin, if that fails."""
        module, _, attribute = self.path.partition(":")
        try:
            loaded = importlib.import_module(module)
            return getattr(loaded, attribute) if attribute else loaded
        except Exception as error:
            raise self.broken(f"{type(error).__name__}: {error}") from error

    def broken(self, reason: str) -> UserError:
        """Return the error for a plugin that cannot be used."""
        return UserError(
            f"the plugin `{self.name}` of the package {self.package} is broken: {reason}",
            where=f"`{self.path}` in {self.folder}",
            fix=f"update or uninstall the package, or set {_SWITCH}=0 to do without plugins",
        )

    def mark_used(self) -> None:
        """Remember that this process uses the plugin."""
        _used.add(str(self))


def used_plugins() -> list[str]:
    """Return the plugins that this process has used, for the records of a run."""
    return sorted(_used)


def find_plugins(group: str | None = None) -> list[Plugin]:
    """Return the plugins of all installed packages, or those of one extension point."""
    if os.environ.get(_SWITCH) == "0":
        return []
    if (key := tuple(sys.path)) not in _found:
        _found[key] = _read_or_scan(_environment_stamp())
    return [plugin for plugin in _found[key] if group in (None, plugin.group)]


def _environment_stamp() -> str:
    """Return a hash of the folders that packages are imported from and of their times. Installing changes a time."""
    stamps: list[str] = []
    for path in sys.path:
        with suppress(OSError):
            stamps.append(f"{path}:{Path(path).stat().st_mtime_ns}")
    return sha256_text(str(Path.cwd()) if "" in sys.path else "", *stamps)[:32]


def _read_or_scan(stamp: str) -> list[Plugin]:
    cache = DiskCache("plugins", max_entries=100)
    with suppress(LookupError, TypeError):
        return [Plugin(**entry) for entry in cache.read(stamp)]
    found = _scan()
    cache.write(stamp, [asdict(plugin) for plugin in found])
    return found


def _scan() -> list[Plugin]:
    found: dict[tuple[str, str], Plugin] = {}
    for distribution in importlib.metadata.distributions():
        try:
            points = [point for point in distribution.entry_points if point.group.startswith(_PREFIX)]
            package = f"{distribution.metadata['Name']} {distribution.version}" if points else ""
        except Exception:  # noqa: BLE001  the metadata of another package: a damaged one must not stop any command
            continue
        for point in points:
            group, folder = point.group.removeprefix(_PREFIX), str(distribution.locate_file(""))
            # As for imports, the first folder of `sys.path` wins.
            found.setdefault((group, point.name), Plugin(group, point.name, point.value, package, folder))
    return sorted(found.values(), key=lambda plugin: (plugin.group, plugin.name))
