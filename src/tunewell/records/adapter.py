"""A PEFT adapter on disk: the names of its files, and its `adapter_config.json`."""

from pathlib import Path
from typing import Any, cast

from tunewell.core.errors import UserError
from tunewell.core.files import parse_json, read_text

ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_FIX = "copy or download the adapter again"


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Read `adapter_config.json`. Raise UserError if the file is missing or damaged."""
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        raise UserError(f"`{folder}` does not contain an adapter", where=f"`{path}` not found")
    try:
        config: object = parse_json(read_text(path))
    except ValueError as error:
        raise UserError(f"`{path}` is damaged", where=str(error), fix=_FIX) from error
    if not isinstance(config, dict):
        raise UserError(f"`{path}` is damaged", where="it is not a JSON object", fix=_FIX)
    return cast(dict[str, Any], config)
