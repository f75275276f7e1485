"""Read and write the manifest of a checkpoint, and verify the files of the checkpoint.

checkpoints/step-000123/   adapter_model.safetensors  optimizer.safetensors  state.json ...   manifest.json, last
"""

import hashlib
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.files import parse_json, read_bytes, sha256_file, sha256_text, stable_json, write_synced
from tunewell.core.units import count
from tunewell.records.base import FileRecord, Record, require_known_version
from tunewell.records.events import plain

FORMAT = "tunewell-checkpoint"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
STAGED = ".tmp"
"""Suffix of a checkpoint folder that is not complete yet."""

_THREADS = 4
_NAME = re.compile(r"step-(\d{6,18})")


class DamagedCheckpoint(UserError):
    """Raised for a checkpoint that changed after it was saved; `what` names the file."""


class CheckpointManifest(Record):
    """The manifest of a checkpoint; a folder without one is not a checkpoint."""

    format: str = FORMAT
    format_version: int = FORMAT_VERSION
    made_by: str
    step: int
    """Finished optimizer steps."""
    best_step: int | None
    """The best step up to this one, by right answers or the loss on the selection slice; None if none was compared."""
    files: dict[str, FileRecord]
    """All other files of the folder, by relative path."""
    identity: dict[str, Any]
    """Settings that must be equal on resume."""
    progress: dict[str, Any]
    versions: dict[str, str]


def checkpoint_name(step: int) -> str:
    """Return the folder name of the checkpoint of a step."""
    return f"step-{step:06d}"


def checkpoint_step(name: str) -> int | None:
    """Return the step in the name of a checkpoint folder, or None for any other name."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def saved_steps(folder: Path) -> list[int]:
    """Return the steps that have a checkpoint, damaged or not, in descending order."""
    if not folder.is_dir():
        return []
    steps = (checkpoint_step(entry.name) for entry in folder.iterdir())
    return sorted((step for step in steps if step is not None), reverse=True)


def is_inside(name: str) -> bool:
    """Return True if a file name is inside the checkpoint folder on every system and is not the manifest."""
    parts = PurePosixPath(name).parts
    is_plain = "/".join(parts) == name and not set(name) & set("\\:\0") and not {"..", "/"} & set(parts)
    return bool(parts) and is_plain and name != MANIFEST


def write_manifest(folder: Path, manifest: CheckpointManifest) -> None:
    """Write the manifest with its hash and without secrets. It must be the last file that is written."""
    record = manifest.model_dump()
    for key in ("identity", "progress"):  # not `files`: names and hashes must not be redacted
        record[key] = plain(record[key])
    write_synced(folder / MANIFEST, _sealed(record))


def read_manifest(folder: Path) -> CheckpointManifest:
    """Read the manifest of a checkpoint; raise DamagedCheckpoint if it changed after it was written."""
    data = _read(folder, MANIFEST)
    try:
        record = parse_json(data)
        del record["sha256"]
        if record["format"] == FORMAT:
            require_known_version(record, CheckpointManifest, folder.name)
        if data != _sealed(record):
            raise ValueError("sha256")
        manifest = CheckpointManifest.model_validate(record)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise damaged(folder, MANIFEST, "has changed since it was saved") from error
    if checkpoint_name(manifest.step) != folder.name.removesuffix(STAGED):
        raise damaged(folder, MANIFEST, f"belongs to step {manifest.step:,}")
    return manifest


def verify(folder: Path, *, unread: Callable[[str], bool] = lambda name: False) -> CheckpointManifest:
    """Compare every file of a checkpoint with its manifest; raise DamagedCheckpoint for the first difference.

    Files are hashed in parallel. A file for which `unread` returns True is not hashed: only its size is compared.
    """
    manifest = read_manifest(folder)

    def compare(name: str, expected: FileRecord) -> None:
        try:
            if not is_inside(name) or not (folder / name).is_file():
                raise damaged(folder, name, "is missing")
            size = (folder / name).stat().st_size
            is_read = size == expected.bytes and not unread(name)
            digest = sha256_file(folder / name) if is_read else expected.sha256
        except OSError as error:
            raise damaged(folder, name, f"cannot be read: {error.strerror}") from error
        _require_equal(expected, size, digest, folder=folder, name=name)

    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(compare, manifest.files.keys(), manifest.files.values()))
    return manifest


def read_file(folder: Path, name: str, expected: FileRecord) -> bytes:
    """Return the bytes of a file; raise DamagedCheckpoint if the file has changed since it was saved."""
    data = _read(folder, name)
    _require_equal(expected, len(data), hashlib.sha256(data).hexdigest(), folder=folder, name=name)
    return data


def _sealed(record: dict[str, Any]) -> bytes:
    """Return a manifest with its hash as bytes. Equal manifests give equal bytes, so every change is detected."""
    text = stable_json(record | {"sha256": sha256_text(stable_json(record))})
    return text.encode("utf-8", "backslashreplace")


def _require_equal(expected: FileRecord, size: int, digest: str, *, folder: Path, name: str) -> None:
    if size != expected.bytes:
        raise damaged(folder, name, f"has {count(size, 'byte')}; expected {count(expected.bytes)}")
    if digest != expected.sha256:
        raise damaged(folder, name, "does not match the hash in the manifest")


def _read(folder: Path, name: str) -> bytes:
    try:
        return read_bytes(folder / name)
    except FileNotFoundError:
        raise damaged(folder, name, "is missing") from None
    except OSError as error:
        raise damaged(folder, name, f"cannot be read: {error.strerror}") from error


def damaged(folder: Path, name: str, how: str) -> DamagedCheckpoint:
    """Return the error for a file of a checkpoint that is not as it was saved."""
    return DamagedCheckpoint(f"checkpoint `{folder.name}` is damaged: `{name}` {how}", where=str(folder / name))
