"""One checkpoint on disk: its manifest, read, written and held against the files; no logic.

checkpoints/step-000123/   adapter_model.safetensors  optimizer.safetensors  state.json ...   manifest.json, last
"""

import hashlib
import json
import re
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import BaseModel, ConfigDict

from tunewell.core.errors import UserError
from tunewell.core.files import sha256_file, sha256_text, stable_json, write_synced
from tunewell.core.units import count
from tunewell.records.events import plain

FORMAT = "tunewell-checkpoint"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
STAGED = ".tmp"
"""What the name of a folder that is still being written ends in."""

_NAME = re.compile(r"step-(\d{6,18})")


class DamagedCheckpoint(UserError):
    """A checkpoint that is not what it was when it was saved; `what` names the file."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)


class FileRecord(_Record):
    """What a file must be for the checkpoint to be whole."""

    bytes: int
    sha256: str


class CheckpointManifest(_Record):
    """Everything a checkpoint says about itself; a folder without it is none."""

    format: str = FORMAT
    format_version: int = FORMAT_VERSION
    made_by: str
    step: int
    """Finished optimizer steps."""
    best_step: int | None
    """The step whose held-out loss was the best so far, this one included; None before the first look."""
    files: dict[str, FileRecord]
    """Every other file of the folder, by its path in it."""
    identity: dict[str, Any]
    """What must be the same for a resume."""
    progress: dict[str, Any]
    """Where the run stood."""
    versions: dict[str, str]
    """Of the software that wrote it."""


def checkpoint_name(step: int) -> str:
    """Name the folder of a step's checkpoint."""
    return f"step-{step:06d}"


def checkpoint_step(name: str) -> int | None:
    """Read the step from the name of a checkpoint's folder; None for any other name."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def is_inside(name: str) -> bool:
    """Tell whether a file's name stays in the checkpoint's folder on every system, and is not the manifest's."""
    parts = PurePosixPath(name).parts
    is_plain = "/".join(parts) == name and not set(name) & set("\\:\0") and not {"..", "/"} & set(parts)
    return bool(parts) and is_plain and name != MANIFEST


def write_manifest(folder: Path, manifest: CheckpointManifest) -> None:
    """Write the manifest, with its own hash and without secrets; the last file of a checkpoint."""
    record = manifest.model_dump()
    for key in ("identity", "progress"):  # names of files and their hashes must stay what they are
        record[key] = plain(record[key])
    write_synced(folder / MANIFEST, _sealed(record))


def read_manifest(folder: Path) -> CheckpointManifest:
    """Read the manifest of a checkpoint; raise DamagedCheckpoint when it is not the one that was written."""
    data = _read(folder, MANIFEST)
    try:
        record = json.loads(data)
        del record["sha256"]
        if record["format"] == FORMAT and record["format_version"] > FORMAT_VERSION:
            raise UserError(f"`{folder.name}` was made by a newer tunewell", fix="pip install --upgrade tunewell")
        if data != _sealed(record):
            raise ValueError("sha256")
        manifest = CheckpointManifest.model_validate(record)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise _damaged(folder, MANIFEST, "has other content than when it was saved") from error
    if checkpoint_name(manifest.step) != folder.name.removesuffix(STAGED):
        raise _damaged(folder, MANIFEST, f"is the one of step {manifest.step:,}")
    return manifest


def verify(folder: Path) -> CheckpointManifest:
    """Hold every file of a checkpoint against its manifest; raise DamagedCheckpoint naming the first that differs."""
    manifest = read_manifest(folder)
    for name, expected in manifest.files.items():
        try:
            if not is_inside(name) or not (folder / name).is_file():
                raise _damaged(folder, name, "is missing")
            size = (folder / name).stat().st_size
            digest = sha256_file(folder / name) if size == expected.bytes else ""
        except OSError as error:
            raise _damaged(folder, name, f"cannot be read: {error.strerror}") from error
        _hold_against(expected, size, digest, folder=folder, name=name)
    return manifest


def read_file(folder: Path, name: str, expected: FileRecord) -> bytes:
    """Read one file of a checkpoint; raise DamagedCheckpoint if these bytes are not the ones that were saved."""
    data = _read(folder, name)
    _hold_against(expected, len(data), hashlib.sha256(data).hexdigest(), folder=folder, name=name)
    return data


def _sealed(record: dict[str, Any]) -> bytes:
    """Write a manifest with its own hash; equal manifests give equal bytes, so that every changed one is found out."""
    text = stable_json(record | {"sha256": sha256_text(stable_json(record))})
    return text.encode("utf-8", "backslashreplace")


def _hold_against(expected: FileRecord, size: int, digest: str, *, folder: Path, name: str) -> None:
    if size != expected.bytes:
        raise _damaged(folder, name, f"has {count(size, 'byte')} instead of {count(expected.bytes)}")
    if digest != expected.sha256:
        raise _damaged(folder, name, "has other bytes than when it was saved")


def _read(folder: Path, name: str) -> bytes:
    try:
        return (folder / name).read_bytes()
    except FileNotFoundError:
        raise _damaged(folder, name, "is missing") from None
    except OSError as error:
        raise _damaged(folder, name, f"cannot be read: {error.strerror}") from error


def _damaged(folder: Path, name: str, how: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"checkpoint `{folder.name}` is damaged: `{name}` {how}", where=str(folder / name))
