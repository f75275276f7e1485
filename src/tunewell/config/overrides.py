"""Set values from the command line in the config tree, and rebase relative paths."""

import os
from pathlib import Path
from typing import Any

from tunewell.config.keys import dotted_name, format_key
from tunewell.config.yaml_reader import KeyPath
from tunewell.core.errors import UserError
from tunewell.core.files import is_url
from tunewell.core.units import count

_ALWAYS_PATHS = ("corpus", "run", "data.sources.path", "data.sources.map", "data.held_out", "verdict.metrics")


def set_value(tree: dict[str, Any], key_path: KeyPath, value: Any) -> None:
    """Set the value at a key path; missing sections are created.

    Raises UserError if the path leads through a single value or past the end of a list.
    """
    here: Any = tree
    for number, step in enumerate(key_path):
        _check_step(here, step, key_path[:number])
        if number == len(key_path) - 1:
            here[step] = value
        else:
            here = here.setdefault(step, {}) if isinstance(here, dict) else here[step]


def _check_step(here: Any, step: str | int, parent: KeyPath) -> None:
    name = format_key(parent)
    if isinstance(here, dict) and isinstance(step, str):
        return
    if not isinstance(here, list):
        raise UserError(f"`{name}` has no key `{step}`", fix=f"`tunewell explain {dotted_name(parent)}`")
    if isinstance(step, str):
        raise UserError(f"`{name}` is a list", fix=f"name the entry: `{name}[0].{step}`")
    if step >= len(here):
        num_entries = count(len(here), "entry", "entries")
        raise UserError(f"`{name}[{step}]` does not exist: `{name}` has {num_entries}, counted from 0")


def rebase_paths(base: Path, name: str, value: Any) -> Any:
    """Rewrite relative paths from the current folder so that they are relative to the config's folder."""
    if base == Path():
        return value
    if isinstance(value, dict):
        return {key: rebase_paths(base, f"{name}.{key}", inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [rebase_paths(base, name, inner) for inner in value]
    return relative_path(value, base) if isinstance(value, str) and _is_path(name, value) else value


def _is_path(name: str, value: str) -> bool:
    if not value or is_url(value) or value.startswith("~") or Path(value).is_absolute():
        return False
    if name in ("model", "tokenizer"):
        return value.endswith((".gguf", ".model")) or Path(value).exists()
    if name in ("template.name", "data.sources.template"):
        return value.endswith(".jinja")
    return name in _ALWAYS_PATHS


def relative_path(value: str | Path, base: Path) -> str:
    """Return a path relative to a folder; absolute if they are on different drives."""
    try:
        return os.path.relpath(value, base)
    except ValueError:  # another drive, on Windows
        return str(Path(value).absolute())
