"""Add to an earlier export in the same folder: find what is kept, what is replaced, and what must not be lost."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tunewell.core.errors import UserError
from tunewell.core.files import sha256_file
from tunewell.export.options import ExportOptions
from tunewell.export.proof.checks import check_files
from tunewell.export.proof.reference import Reference
from tunewell.export.targets.base import ExportTarget, load_target
from tunewell.records.parity import PROOF, REFERENCE, Artefact, Proof, read_proof

_WEIGHT_SUFFIXES = frozenset({".safetensors", ".gguf"})
_OTHER_FOLDER = "choose another folder with `--out`"
_NORM_TOLERANCE = 1e-5
"""Row norms are computed in fp64 and stored in fp32."""


@dataclass(frozen=True)
class ExistingExport:
    """An export in the output folder, split into what stays and what is replaced."""

    folder: Path
    proof: Proof
    kept: list[Artefact]
    replaced: list[Artefact]

    @property
    def notes(self) -> list[str]:
        """Say what was replaced and what was kept."""
        notes = []
        if self.replaced:
            notes.append(f"replaced {_names(self.replaced)} in `{self.folder}`")
        if self.kept:
            notes.append(f"kept {_names(self.kept)} in `{self.folder}`, and proved it again")
        return notes

    def require_same_model(self, proof: Proof, reference: Reference) -> None:
        """Raise UserError if a kept artefact was exported from another model than the present one."""
        if not self.kept:
            return
        old = Reference.load(self.folder / REFERENCE, self.proof.model)
        has_same_text = (proof.probes, proof.stop_ids) == (self.proof.probes, self.proof.stop_ids)
        if not (has_same_text and _has_same_tensors(old, reference)):
            kinds = dict.fromkeys(artefact.kind for artefact in self.proof.artefacts)
            raise UserError(
                f"`{self.folder}` has {_names(self.kept)} of another model, or of another version of tunewell",
                fix=f"export everything again with `--to {','.join(kinds)}`, or {_OTHER_FOLDER}",
            )


def find_existing(out: Path, targets: Sequence[ExportTarget], options: ExportOptions) -> ExistingExport | None:
    """Read the export in the output folder; None if there is none.

    Raises UserError if the new export would overwrite files that are not an export's, or were edited since.
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
    # A folder is loaded as a whole, so it must not contain other files. Files with one format each may have neighbours.
    _require_no_other_files(out, [name for name in formats if not formats[name]], known)
    _require_unedited(out, proof.sha256s)
    for artefact in replaced:
        _require_unedited(out, artefact.sha256s)
    for artefact in kept:
        _require_kept_valid(out, artefact, replaced)
    return ExistingExport(out, proof, kept, replaced)


def _require_kept_valid(out: Path, artefact: Artefact, replaced: Sequence[Artefact]) -> None:
    if not (check := check_files(out, artefact)).is_ok:
        raise UserError(
            f"{artefact.name} in `{out}` changed since it was exported: {check.words}",
            fix=f"export it again too with `--to {artefact.kind},...`, or {_OTHER_FOLDER}",
        )
    sources = load_target(artefact.kind).requires.targets
    replaced_hashes = {sha for own in replaced if own.kind in sources for sha in own.sha256s.values()}
    if replaced_hashes & set(artefact.sha256s.values()):
        raise UserError(
            f"`{out / artefact.path}` uses a file that would be replaced",
            fix=f"add `{artefact.kind}` to `--to`, or {_OTHER_FOLDER}",
        )


def _require_no_other_files(out: Path, folders: Iterable[str], known: set[str]) -> None:
    for name in folders:
        folder = out / name
        files = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else [folder]
        for path in files if folder.exists() else []:
            relative = path.relative_to(out)
            if relative.as_posix() not in known and not any(part.startswith(".") for part in relative.parts):
                raise UserError(
                    f"`{path}` is in the way: it does not belong to an export", fix=f"move it, or {_OTHER_FOLDER}"
                )


def _require_unedited(out: Path, sha256s: dict[str, str]) -> None:
    """Raise UserError if a text file was edited. Weights that differ are damaged, and may be replaced."""
    for name, sha in sha256s.items():
        path = out / name
        if path.suffix not in _WEIGHT_SUFFIXES and path.is_file() and sha256_file(path) != sha:
            raise UserError(
                f"`{path}` was changed since it was exported, and would be replaced",
                fix=f"move it, or {_OTHER_FOLDER}",
            )


def _has_same_tensors(old: Reference, new: Reference) -> bool:
    if old.sketches.keys() != new.sketches.keys():
        return False
    pairs = ((sketch.lengths, new.sketches[name].lengths) for name, sketch in old.sketches.items())
    return all(
        one.shape == other.shape and np.allclose(one, other, rtol=_NORM_TOLERANCE, atol=_NORM_TOLERANCE)
        for one, other in pairs
    )


def _names(artefacts: Iterable[Artefact]) -> str:
    return ", ".join(artefact.name for artefact in artefacts)
