"""The figures of an export that was not proven, beside where it would have been."""

import json
from pathlib import Path

from tunewell.records.parity import FORMAT, Parity, write_record


def keep_failed(out: Path, parity: Parity) -> Path:
    """Write why an export was not proven, over what an earlier one left there, and never over anything else."""
    number, path = 1, _path(out)
    while path.exists() and not _is_ours(path):
        number += 1
        path = out.with_name(f"{out.name}-failed-{number}.json")
    write_record(path, parity)
    return path


def forget_failed(out: Path) -> None:
    """Remove the figures of an earlier export, once a later one is proven."""
    if _is_ours(_path(out)):
        _path(out).unlink()


def _path(out: Path) -> Path:
    return out.with_name(f"{out.name}-failed.json")


def _is_ours(path: Path) -> bool:
    try:
        return json.loads(path.read_text(encoding="utf-8"))["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError):
        return False
