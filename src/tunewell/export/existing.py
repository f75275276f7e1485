"""An export that lies in the folder already: what of it stays, what is made again, and what must not be lost."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tunewell.core.errors import UserError
from tunewell.core.files import sha256_file
from tunewell.export.proof.checks import check_files
from tunewell.export.proof.reference import Reference
from tunewell.records.parity import PROOF, REFERENCE, Artefact, Proof, read_proof

_WEIGHTS = frozenset({".safetensors", ".gguf"})
_ELSEWHERE = "name another folder with `--out`"
_SAME = 1e-5
"""By which lengths of rows may differ, computed in fp64 and kept in fp32."""


@dataclass(frozen=True)
class ExistingExport:
    """What is there, by what becomes of it."""

    folder: Path
    proof: Proof
    kept: list[Artefact]
    replaced: list[Artefact]

    @property
    def notes(self) -> list[str]:
        """Say what of it was made again and what stayed."""
        words = []
        if self.replaced:
            words.append(f"{_names(self.replaced)} in `{self.folder}` replaced what was there")
        if self.kept:
            words.append(f"{_names(self.kept)} in `{self.folder}` stayed, and was proven again")
        return words

    def refuse_other(self, proof: Proof, reference: Reference) -> None:
        """Raise UserError where what is to stay was made of another model than the one that is exported now."""
        if not self.kept:
            return
        old = Reference.load(self.folder / REFERENCE, self.proof.model)
        is_read_alike = (proof.probes, proof.stop_ids) == (self.proof.probes, self.proof.stop_ids)
        if not (is_read_alike and _is_same(old, reference)):
            raise UserError(
                f"`{self.folder}` holds {_names(self.kept)} of another model, or of another version of tunewell",
                fix=f"make all of it again with `--to {','.join(_kinds(self))}`, or {_ELSEWHERE}",
            )


def find_existing(out: Path, wanted: Sequence[str], kinds: Sequence[str]) -> ExistingExport | None:
    """Read what lies where an export is to be; None where there is nothing.

    Raises UserError where something would be lost that is no export's, or was changed since.
    """
    if not out.exists() or (out.is_dir() and not any(not own.name.startswith(".") for own in out.iterdir())):
        return None
    if not out.is_dir() or not (out / PROOF).is_file():
        raise UserError(f"`{out}` is not empty and is no export", fix=_ELSEWHERE)
    proof = read_proof(out)
    has_gguf = bool({"gguf", "ollama"} & set(wanted))
    replaced = [own for own in proof.artefacts if _is_made_again(own, wanted, kinds if has_gguf else ())]
    kept = [own for own in proof.artefacts if own not in replaced]
    _refuse_foreign(out, wanted, proof.artefacts)
    _refuse_changed(
        out, {name: sha for own in (proof.sha256s, *(r.sha256s for r in replaced)) for name, sha in own.items()}
    )
    remade = {sha for own in replaced if own.kind == "gguf" for sha in own.sha256s.values()}
    for own in kept:
        if not (found := check_files(out, own)).is_ok:
            raise UserError(
                f"{own.name} in `{out}` is no longer what was exported: {found.words}",
                fix=f"make it again too with `--to {own.kind},...`, or {_ELSEWHERE}",
            )
        if own.kind == "ollama" and remade & set(own.sha256s.values()):
            raise UserError(
                f"`{out / own.path}` was made of a GGUF file that would be made again",
                fix=f"add `ollama` to `--to`, or {_ELSEWHERE}",
            )
    return ExistingExport(out, proof, kept, replaced)


def _is_made_again(own: Artefact, wanted: Sequence[str], kinds: Sequence[str]) -> bool:
    return own.precision in kinds if own.kind == "gguf" else own.kind in wanted


def _refuse_foreign(out: Path, wanted: Sequence[str], artefacts: Iterable[Artefact]) -> None:
    """Refuse files among those of an artefact that are none of its own: whoever loads the folder may read them."""
    known = {name for own in artefacts for name in own.sha256s}
    for kind in ("adapter", "merged", "ollama"):
        place = out / kind
        if kind not in wanted or not place.exists():
            continue
        for path in [place] if not place.is_dir() else sorted(own for own in place.rglob("*") if own.is_file()):
            name = path.relative_to(out)
            if name.as_posix() not in known and not any(part.startswith(".") for part in name.parts):
                raise UserError(f"`{path}` is in the way and is no export's", fix=f"move it away, or {_ELSEWHERE}")


def _refuse_changed(out: Path, sha256s: dict[str, str]) -> None:
    """Refuse to replace a text that somebody has worked on; weights that changed are damaged, and better made again."""
    for name, sha in sha256s.items():
        path = out / name
        if path.suffix not in _WEIGHTS and path.is_file() and sha256_file(path) != sha:
            raise UserError(
                f"`{path}` was changed since it was exported, and would be replaced",
                fix=f"move it away, or {_ELSEWHERE}",
            )


def _is_same(old: Reference, new: Reference) -> bool:
    if old.sketches.keys() != new.sketches.keys():
        return False
    pairs = ((own.lengths, new.sketches[name].lengths) for name, own in old.sketches.items())
    return all(one.shape == other.shape and np.allclose(one, other, rtol=_SAME, atol=_SAME) for one, other in pairs)


def _names(artefacts: Iterable[Artefact]) -> str:
    return ", ".join(own.name for own in artefacts)


def _kinds(standing: ExistingExport) -> list[str]:
    return list(dict.fromkeys(own.kind for own in standing.proof.artefacts))
