"""The table of features, `features.toml`: what each folder in `features/` adds, by import path.

The spine reaches a feature only through this table. A feature is removed by deleting its folder and its entry there.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.files import read_data
from tunewell.core.plugins import Plugin, find_plugins
from tunewell.core.registry import load_path

_PACKAGE = "tunewell.features"


@cache
def features() -> dict[str, dict[str, Any]]:
    """Return the parts of each feature by its name, as `features.toml` has them."""
    return read_data(__file__, "features.toml")


def plugin_commands() -> dict[str, Plugin]:
    """Return the features of other packages by the name of their command."""
    return {plugin.name: plugin for plugin in find_plugins("features")}


def find_hook(feature: str, name: str) -> Callable[..., Any] | None:
    """Return a function of a feature, or None if this installation does not have the feature."""
    parts = features().get(feature)
    return load_path(f"{_PACKAGE}.{feature}.{parts['hooks'][name]}") if parts else None


def require_hook(feature: str, name: str, *, needed_by: str) -> Callable[..., Any]:
    """Return a function of a feature; raise UserError if this installation does not have the feature."""
    found = find_hook(feature, name)
    if found is None:
        what = f"{needed_by} needs the feature `{feature}`, which this installation does not have"
        raise UserError(what, fix="install tunewell with all its features")
    return found


def modules(part: str) -> dict[str, str]:
    """Return the module of each command, or of each public name: the `part` is `commands` or `functions`."""
    return {
        name: f"{_PACKAGE}.{feature}.{module}"
        for feature, parts in features().items()
        for name, module in parts.get(part, {}).items()
    }


def extension_entries(kind: str) -> list[tuple[str, ...]]:
    """Return the entries that features add to the registry of a kind: name, doc, import path, and the rest."""
    return [
        (name, doc, f"{_PACKAGE}.{feature}.{path}", *rest)
        for feature, parts in features().items()
        for name, doc, path, *rest in parts.get("extensions", {}).get(kind, ())
    ]
