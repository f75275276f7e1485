"""Collect what `tunewell push` uploads: a verified export, and the report of its run."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.files import sha256_file
from tunewell.core.version import made_by
from tunewell.features.remote.push import PushedFile
from tunewell.records.base import read_record
from tunewell.records.parity import PARITY, PROOF, Parity, read_proof
from tunewell.records.plan import PLAN

_RUN_FILES = (PLAN, "report.json", "report.html", "outcome.json", "loss.svg")
"""Files of a run that prove how a model was made. They contain no secrets."""
_EXPORT = "export"
_EXPORT_FIRST = "export the model first: `tunewell export {} --to adapter`"


@dataclass
class PushContent:
    """The files of a push by their names in it."""

    files: dict[str, Path] = field(default_factory=dict[str, Path])
    about: dict[str, Any] = field(default_factory=dict[str, Any])
    notes: list[str] = field(default_factory=list[str])

    def hashed(self) -> dict[str, PushedFile]:
        """Return size and hash of every file; raise UserError if a file of the export was changed."""
        return {name: PushedFile(path, path.stat().st_size, sha256_file(path)) for name, path in self.files.items()}


def collect(place: Path) -> PushContent:
    """Return the files of an export, or of a run and its export; raise UserError if there is nothing to push."""
    if (place / PROOF).is_file():
        run = place.resolve().parent
        return _export_content(place, run if (run / PLAN).is_file() and place.resolve().name == _EXPORT else None)
    if not (place / PLAN).is_file():
        raise UserError(
            f"`{place}` is neither a run nor an export" if place.exists() else f"there is no folder `{place}`",
            fix="name a folder that `tunewell train` or `tunewell export` wrote",
        )
    if (place / _EXPORT / PROOF).is_file():
        return _export_content(place / _EXPORT, place)
    if not (place / "report.json").is_file():
        raise UserError(f"the run `{place}` has no export and no report", fix=_EXPORT_FIRST.format(place))
    content = PushContent(about={"made_by": made_by(), "kind": "report", "name": place.resolve().name})
    content.files = {"README.md": place / "README.md"} if (place / "README.md").is_file() else {}
    content.files |= {name: place / name for name in _RUN_FILES if (place / name).is_file()}
    content.notes.append(f"there is no export: only the report is pushed; {_EXPORT_FIRST.format(place)}")
    return content


def _export_content(folder: Path, run: Path | None) -> PushContent:
    proof = read_proof(folder)
    if not (folder / PARITY).is_file() or not read_record(folder / PARITY, Parity).is_ok:
        raise UserError(f"the export `{folder}` is not verified", fix=f"run `tunewell verify {folder}`")
    expected = {**proof.sha256s, **{name: sha for own in proof.artefacts for name, sha in own.sha256s.items()}}
    for name, sha256 in expected.items():
        if not (folder / name).is_file() or sha256_file(folder / name) != sha256:
            raise UserError(
                f"`{folder / name}` is missing or was changed after the export", fix="export the model again"
            )
    names = [*expected, *(name for name in (PROOF, PARITY, "README.md") if name not in expected)]
    content = PushContent({name: folder / name for name in names if (folder / name).is_file()})
    if run is not None:
        content.files |= {f"run/{name}": run / name for name in _RUN_FILES if (run / name).is_file()}
    content.about = {
        "made_by": made_by(),
        "kind": "export",
        "name": proof.subject,
        "base": proof.base,
        "license": proof.model.license,
        "artefacts": [artefact.name for artefact in proof.artefacts],
    }
    others = sorted(path.name for path in folder.iterdir() if not path.name.startswith(".") and path.is_file())
    unknown = [name for name in others if name not in content.files]
    if unknown:
        content.notes.append(f"not pushed, because the export did not write it: {', '.join(unknown)}")
    return content
