"""A PEFT adapter on disk: the names of its files, and its `adapter_config.json`."""

import json
from pathlib import Path
from typing import Any

from tunewell.core.errors import UserError

ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Read `adapter_config.json`. Raise UserError if the file is missing."""
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        raise UserError(f"`{folder}` does not contain an adapter", where=f"`{path}` not found")
    return json.loads(path.read_text(encoding="utf-8"))
