"""Read the tables of this package: passages, instructions and reasons."""

import json
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def read_table(name: str) -> list[dict[str, Any]]:
    """Return the rows of a table, one JSON object per line."""
    text = files("tunewell.evaluation").joinpath(name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines() if line.strip()]
