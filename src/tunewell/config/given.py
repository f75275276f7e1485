"""A config that a program hands over as a mapping, made into what a file would have been read as."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunewell.config.keys import write_key
from tunewell.config.yaml_reader import MAX_DEPTH, Steps
from tunewell.core.errors import UserError

GIVEN = "the config"
"""The origin of every value of such a config."""


def read_mapping(given: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[Steps, str]]:
    """Copy a mapping into plain dictionaries and lists, with the origin of each value.

    Raises UserError for a key that is no text, and for what holds itself.
    """
    origins: dict[Steps, str] = {}
    return _plain(given, (), origins), origins


def _plain(value: Any, steps: Steps, origins: dict[Steps, str]) -> Any:
    if len(steps) > MAX_DEPTH:
        raise UserError(f"the config is nested more than {MAX_DEPTH} deep", where=f"`{write_key(steps[:3])}`")
    origins[steps] = GIVEN
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise UserError(f"the key {key!r} is no text", where=f"`{write_key(steps)}`" if steps else GIVEN)
        return {key: _plain(entry, (*steps, key), origins) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry, (*steps, number), origins) for number, entry in enumerate(value)]
    return str(value) if isinstance(value, Path) else value
