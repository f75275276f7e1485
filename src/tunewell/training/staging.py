"""Write a whole checkpoint into a folder that nobody reads yet, and read it back."""

import hashlib
import platform
import shutil
from importlib.metadata import version
from pathlib import Path

import safetensors.torch

from tunewell import __version__
from tunewell.core.files import sync_folder, write_synced
from tunewell.core.redact import redact
from tunewell.records.checkpoint import CheckpointManifest, FileRecord, verify, write_manifest
from tunewell.training.snapshot import Snapshot

_LIBRARIES = ("torch", "safetensors")


def write_checkpoint(folder: Path, snapshot: Snapshot, *, best_step: int | None) -> list[str]:
    """Write every file, each flushed, the manifest last, and hold what lies there against it.

    Gives the names of the texts that secrets were taken out of. Raises OSError, or DamagedCheckpoint when the disk
    gives back other bytes than it got.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    files, redacted = {}, []
    for name, tensors in snapshot.tensors.items():
        files[name] = _write(folder / name, safetensors.torch.save(tensors))
    for name, text in snapshot.texts.items():
        clean = redact(text)
        files[name] = _write(folder / name, clean.encode("utf-8", "surrogatepass"))
        if clean != text:
            redacted.append(name)
    for inner in sorted({(folder / name).parent for name in files} - {folder}):
        sync_folder(inner)
    manifest = CheckpointManifest(
        made_by=f"tunewell {__version__}",
        step=snapshot.step,
        best_step=best_step,
        files=files,
        identity=snapshot.identity,
        progress=snapshot.progress,
        versions={"python": platform.python_version(), **{name: version(name) for name in _LIBRARIES}},
    )
    write_manifest(folder, manifest)
    verify(folder)
    return redacted


def _write(path: Path, data: bytes) -> FileRecord:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_synced(path, data)
    return FileRecord(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
