"""The output folder of an export: find an earlier export, check disk space, stage new files, and publish them."""

import itertools
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tunewell.core.errors import UserError
from tunewell.core.files import FolderLock, is_disk_full, link_or_copy, parse_json, read_text, sha256_file, sync_folder
from tunewell.core.units import size_bytes
from tunewell.export.options import ExportOptions
from tunewell.export.proof.checks import check_files, visible_files
from tunewell.export.proof.reference import Reference
from tunewell.export.targets.base import ExportContext, ExportTarget, load_target
from tunewell.records.parity import FORMAT, PARITY, PROOF, REFERENCE, Artefact, Parity, Proof, read_proof, write_record

# An earlier export in the output folder: decide which artefacts are kept or replaced, and protect the user's files.

_WEIGHT_SUFFIXES = frozenset({".safetensors", ".gguf"})
_OTHER_FOLDER = "choose another folder with `--out`"
_NORM_TOLERANCE = 1e-5
"""Tolerance for row norms, which are computed in fp64 and stored in fp32."""


@dataclass(frozen=True)
class ExistingExport:
    """An earlier export in the output folder, with its kept and its replaced artefacts."""

    folder: Path
    proof: Proof
    kept: list[Artefact]
    replaced: list[Artefact]

    @property
    def notes(self) -> list[str]:
        """Notes for the user on the replaced and the kept artefacts."""
        notes = []
        if self.replaced:
            notes.append(f"replaced {_names(self.replaced)} in `{self.folder}`")
        if self.kept:
            notes.append(f"kept {_names(self.kept)} in `{self.folder}` and verified it again")
        return notes

    def require_same_model(self, proof: Proof, reference: Reference) -> None:
        """Raise UserError if the kept artefacts were exported from a different model."""
        if not self.kept:
            return
        old = Reference.load(self.folder / REFERENCE, self.proof.model)
        has_same_text = (proof.probes, proof.stop_ids) == (self.proof.probes, self.proof.stop_ids)
        if not (has_same_text and _has_same_tensors(old, reference)):
            kinds = dict.fromkeys(artefact.kind for artefact in self.proof.artefacts)
            raise UserError(
                f"`{self.folder}` has {_names(self.kept)} of a different model, or of a different version of tunewell",
                fix=f"export everything again with `--to {','.join(kinds)}`, or {_OTHER_FOLDER}",
            )

    def copy_kept(self, folder: Path) -> None:
        """Link or copy the kept artefacts to the staging folder, where they are verified with the new ones."""
        for name in (name for artefact in self.kept for name in artefact.sha256s):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(self.folder / name, target)


def find_existing(out: Path, targets: Sequence[ExportTarget], options: ExportOptions) -> ExistingExport | None:
    """Return the export in the output folder, or None if the folder is missing or empty.

    Raises UserError if the new export would overwrite files that do not belong to an export or were edited.
    """
    if not out.exists() or (out.is_dir() and not any(not path.name.startswith(".") for path in out.iterdir())):
        return None
    if not out.is_dir() or not (out / PROOF).is_file():
        raise UserError(f"`{out}` is not empty and is not an export", fix=_OTHER_FOLDER)
    proof = read_proof(out)
    formats = {target.name: target.formats(options) for target in targets}
    replaced = [
        artefact
        for artefact in proof.artefacts
        if artefact.kind in formats and artefact.precision in (formats[artefact.kind] or (artefact.precision,))
    ]
    kept = [artefact for artefact in proof.artefacts if artefact not in replaced]
    known = {name for artefact in proof.artefacts for name in artefact.sha256s}
    # Loaders read all files of a folder, so it must not contain other files. A GGUF file is loaded alone, so other
    # files in its folder do no harm.
    for name in (name for kind in formats if not formats[kind] for name in visible_files(out, out / kind)):
        if name not in known:
            raise UserError(
                f"`{out / name}` is in the way: the file does not belong to an export",
                fix=f"move the file, or {_OTHER_FOLDER}",
            )
    _require_unedited(out, {name: sha for own in replaced for name, sha in own.sha256s.items()} | proof.sha256s)
    for artefact in kept:
        _require_kept_valid(out, artefact, replaced)
    return ExistingExport(out, proof, kept, replaced)


def _require_unedited(out: Path, sha256s: dict[str, str]) -> None:
    """Raise UserError if a text file was edited. Changed weight files count as damaged and may be replaced."""
    for name, sha in sha256s.items():
        path = out / name
        if path.suffix not in _WEIGHT_SUFFIXES and path.is_file() and sha256_file(path) != sha:
            raise UserError(
                f"`{path}` was changed after it was exported, and would be overwritten",
                fix=f"move the file, or {_OTHER_FOLDER}",
            )


def _require_kept_valid(out: Path, artefact: Artefact, replaced: Sequence[Artefact]) -> None:
    """Raise UserError if a kept artefact was changed, or contains a file that would be replaced."""
    if not (check := check_files(out, artefact)).is_ok:
        raise UserError(
            f"{artefact.name} in `{out}` was changed after it was exported: {check.words}",
            fix=f"export it again with `--to {artefact.kind},...`, or {_OTHER_FOLDER}",
        )
    sources = load_target(artefact.kind).requires.targets
    if any(set(own.sha256s.values()) & set(artefact.sha256s.values()) for own in replaced if own.kind in sources):
        raise UserError(
            f"`{out / artefact.path}` uses a file that would be replaced",
            fix=f"add `{artefact.kind}` to `--to`, or {_OTHER_FOLDER}",
        )


def _has_same_tensors(old: Reference, new: Reference) -> bool:
    return old.sketches.keys() == new.sketches.keys() and all(
        own.shape == new.sketches[name].shape
        and np.allclose(own.lengths, new.sketches[name].lengths, rtol=_NORM_TOLERANCE, atol=_NORM_TOLERANCE)
        for name, own in old.sketches.items()
    )


def _names(artefacts: Iterable[Artefact]) -> str:
    return ", ".join(artefact.name for artefact in artefacts)


# Staging: the export is written to a hidden folder and published when it is complete.

_LOCK = "tunewell-export.lock"
_SHARED_FILES = (PARITY, PROOF, REFERENCE, "README.md")
"""Files of an export that belong to no artefact."""


class Staging(NamedTuple):
    """The temporary folders of an export, on the same disk as the output folder."""

    folder: Path
    """The new export."""
    replaced: Path
    """Replaced files, kept until all new files have their final names."""


@contextmanager
def open_staging(out: Path) -> Iterator[Staging]:
    """Yield staging folders on the same disk as `out`; remove them at the end.

    Raises UserError if the disk is not writable, or if another process is exporting to the same folder.
    """
    with _report_full_disk(out):
        hidden = _make_hidden_folder(out)
        try:
            with FolderLock.take(hidden / _LOCK, doing=f"exporting to `{out}`"):
                _remove_abandoned(out, hidden)
                staging = Staging(hidden / "export", hidden / "replaced")
                for folder in staging:
                    folder.mkdir()
                yield staging
        finally:
            shutil.rmtree(hidden, ignore_errors=True)


def publish(staging: Staging, out: Path, existing: ExistingExport | None) -> None:
    """Move a finished export to the output folder.

    A new folder is renamed at once. In an existing folder, files are moved one by one, `parity.json` and `proof.json`
    last. If a move fails, all moves are undone. Files that do not belong to an export are never moved.
    """
    _set_permissions(staging.folder)
    sync_folder(staging.folder)
    if not out.exists():
        staging.folder.rename(out)
        sync_folder(out.parent)
        return
    kept, replaced = (existing.kept, existing.replaced) if existing else ([], [])
    names = {path.relative_to(staging.folder).as_posix() for path in staging.folder.rglob("*") if path.is_file()}
    new = sorted(names - {name for artefact in kept for name in artefact.sha256s})
    old = [*_SHARED_FILES, *(name for artefact in replaced for name in artefact.sha256s)]
    for name in new:
        if name not in old and (out / name).exists():
            raise UserError(
                f"`{out / name}` is in the way: the file does not belong to this export",
                fix="move the file, or choose another folder with `--out`",
            )
    with ExitStack() as undo:
        for name in old:
            if (out / name).exists():
                _move(out / name, staging.replaced / name, undo)
        for name in sorted(new, key=lambda name: (name == PARITY, name == PROOF)):
            _move(staging.folder / name, out / name, undo)
        undo.pop_all()
    sync_folder(out)


def write_failed_parity(out: Path, parity: Parity) -> Path:
    """Write the parity of a failed export beside `out`; overwrite only the file of an earlier failure."""
    suffixes = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    paths = (out.with_name(f"{out.name}-failed{suffix}.json") for suffix in suffixes)
    path = next(path for path in paths if not path.exists() or _is_parity(path))
    write_record(path, parity)
    return path


def remove_failed_parity(out: Path) -> None:
    """Remove the parity file of an earlier failure."""
    path = out.with_name(f"{out.name}-failed.json")
    if _is_parity(path):
        path.unlink()


def _is_parity(path: Path) -> bool:
    try:
        return parse_json(read_text(path))["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _move(source: Path, target: Path, undo: ExitStack) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    source.rename(target)
    undo.callback(target.rename, source)


def _set_permissions(folder: Path) -> None:
    """Set default permissions on every file, because some libraries write files that only the owner can read.

    The proof stays private: it contains questions and answers of the run.
    """
    mode = (folder / PROOF).stat().st_mode & 0o777
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_nlink == 1:
            path.chmod(mode & 0o600 if path == folder / PROOF else mode)


def _hidden_prefix(out: Path) -> str:
    return f".{out.name}.tunewell-"


def _make_hidden_folder(out: Path) -> Path:
    """Create a hidden folder beside the output folder, or inside it if it exists and so may be a mount point."""
    parent = out if out.is_dir() else out.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(dir=parent, prefix=_hidden_prefix(out)))
    except OSError as error:
        raise UserError(
            f"`{out}` cannot be written", where=error.strerror or str(error), fix="choose another folder with `--out`"
        ) from error


def _remove_abandoned(out: Path, hidden: Path) -> None:
    """Remove staging folders of killed exports; raise UserError if another export is still running."""
    for parent in (out.parent, out):
        for other in sorted(parent.glob(f"{_hidden_prefix(out)}*")) if parent.is_dir() else []:
            if other != hidden and (other / _LOCK).is_file():
                FolderLock.take(other / _LOCK, doing=f"exporting to `{out}`").release()
                shutil.rmtree(other, ignore_errors=True)


@contextmanager
def _report_full_disk(out: Path) -> Iterator[None]:
    """Convert the OSError of a full disk to a UserError."""
    try:
        yield
    except OSError as error:
        if not is_disk_full(error):
            raise
        raise UserError(
            f"the disk is full; `{out}` was not written", fix="free some space, or choose another disk with `--out`"
        ) from error


# Disk space.

_OTHER_FILES_BYTES = 64 << 20
"""Allowance for tokenizers, model cards and the reference of the verification."""


@dataclass(frozen=True)
class DiskSpace:
    """The disk space that an export needs, and the free space."""

    written: dict[str, int]
    """Bytes by artefact name."""
    free_bytes: int

    @property
    def needed_bytes(self) -> int:
        """The peak disk usage."""
        return sum(self.written.values()) + _OTHER_FILES_BYTES

    def __str__(self) -> str:
        artefacts = ", ".join(f"{name} {size_bytes(size)}" for name, size in self.written.items())
        return f"will write about {artefacts}; {size_bytes(self.free_bytes)} free"

    def require_enough(self, out: Path) -> None:
        """Raise UserError if there is less free space than the export needs."""
        if self.free_bytes < self.needed_bytes:
            raise UserError(
                f"not enough disk space: {size_bytes(self.needed_bytes - self.free_bytes)} short",
                where=f"`{out}`; {self}",
                fix="free some space, choose another disk with `--out`, or fewer targets with `--to` and `--gguf`",
            )


def estimate_disk_space(targets: Iterable[ExportTarget], context: ExportContext) -> DiskSpace:
    """Return the disk space that all targets need together."""
    written = {name: size for target in targets for name, size in target.disk_use(context).written.items()}
    return DiskSpace(written, shutil.disk_usage(context.staging_dir).free)
