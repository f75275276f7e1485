"""`base.json`: the content of a run's base model when the run was trained."""

from pathlib import Path
from typing import Any

from tunewell.records.base import Record, read_record

BASE = "base.json"


class BaseContent(Record):
    """The content of a model, without the names, formats and times of its files. Unknown parts are empty."""

    format_version: int = 1
    weights: dict[str, str] = {}
    """Hash of each tensor."""
    config: dict[str, Any] = {}
    tokenizer: dict[str, str] = {}
    """Hash of the vocabulary, and of everything that can change token ids."""
    fingerprint: str | None = None
    """For a run of an earlier version: the hash of the weight files in its checkpoint."""


def read_base(run: Path) -> BaseContent | None:
    """Return the content of a run's base model, or None for a run of an earlier version."""
    return read_record(run / BASE, BaseContent) if (run / BASE).is_file() else None
