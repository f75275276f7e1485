"""`tunewell push`: upload a verified export, or the report of a run, to object storage or to the hub."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tunewell.config.rules import Storage
from tunewell.core.errors import UserError
from tunewell.core.files import link_or_copy, sha256_file, stable_json
from tunewell.core.progress import Progress, ProgressListener, silent
from tunewell.core.version import made_by
from tunewell.features.remote.address import BUCKET_SCHEMES
from tunewell.features.remote.hub import push_to_hub, repository_of
from tunewell.features.remote.push import MANIFEST, Pushed, PushedFile, push_files, push_manifest
from tunewell.records.base import read_record
from tunewell.records.parity import PARITY, PROOF, Parity, read_proof
from tunewell.records.plan import PLAN

_RUN_FILES = (PLAN, "report.json", "report.html", "outcome.json", "loss.svg")
"""Files of a run that prove how a model was made. They contain no secrets."""
_EXPORT = "export"
_EXPORT_FIRST = "export the model first: `tunewell export {} --to adapter`"


@dataclass(frozen=True)
class PushResult:
    """The files that were uploaded, or would be."""

    to: str
    files: dict[str, int]
    """Size in bytes by name."""
    pushed: Pushed | None
    """None with `--dry-run`."""
    folder: Path | None = None
    notes: list[str] = field(default_factory=list[str])

    def as_json(self) -> dict[str, Any]:
        """Return the object that `push --json` prints."""
        pushed = asdict(self.pushed) if self.pushed else None
        folder = str(self.folder) if self.folder else None
        return {"to": self.to, "files": self.files, "pushed": pushed, "folder": folder, "notes": self.notes}


def push(
    place: str | Path,
    to: str,
    *,
    storage: Storage | None = None,
    is_public: bool = False,
    is_dry_run: bool = False,
    out: Path | None = None,
    progress: ProgressListener = silent,
) -> PushResult:
    """Upload a run or an export. `is_dry_run` writes the folder that would be uploaded to `out`."""
    scheme = to.partition("://")[0]
    if scheme == "hf":
        repository_of(to)
    elif scheme not in BUCKET_SCHEMES:
        raise UserError(f"cannot push to `{to}`", fix="write `--to s3://BUCKET/PREFIX`, `r2://...` or `hf://USER/NAME`")
    paths, about, notes = _collect(Path(place).expanduser())
    progress(Progress("hashing"))
    files = {name: PushedFile(path, path.stat().st_size, sha256_file(path)) for name, path in paths.items()}
    sizes = {name: file.size for name, file in files.items()}
    if is_dry_run:
        folder = out or Path(f"{Path(place).resolve().name}-push")
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"the folder `{folder}` is not empty", fix="choose another one with `--out`")
        for name, file in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(file.path, folder / name)
        (folder / MANIFEST).write_text(stable_json(push_manifest(files, about)), encoding="utf-8")
        return PushResult(to, sizes, None, folder, notes)
    if scheme == "hf":
        pushed = push_to_hub(to, files, about, is_public=is_public, progress=progress)
    else:
        pushed = push_files(to, files, about, settings=storage or Storage(), progress=progress)
    return PushResult(to, sizes, pushed, notes=notes)


_Content = tuple[dict[str, Path], dict[str, Any], list[str]]
"""Files by their names in the push, entries of its manifest, and notes."""


def _collect(place: Path) -> _Content:
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
    about = {"made_by": made_by(), "kind": "report", "name": place.resolve().name}
    note = f"there is no export: only the report is pushed; {_EXPORT_FIRST.format(place)}"
    return _present(place, ["README.md", *_RUN_FILES]), about, [note]


def _present(folder: Path, names: Iterable[str], prefix: str = "") -> dict[str, Path]:
    return {f"{prefix}{name}": folder / name for name in names if (folder / name).is_file()}


def _export_content(folder: Path, run: Path | None) -> _Content:
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
    files = _present(folder, names) | (_present(run, _RUN_FILES, "run/") if run is not None else {})
    about = {
        "made_by": made_by(),
        "kind": "export",
        "name": proof.subject,
        "base": proof.base,
        "license": proof.model.license,
        "artefacts": [artefact.name for artefact in proof.artefacts],
    }
    others = sorted(path.name for path in folder.iterdir() if not path.name.startswith(".") and path.is_file())
    unknown = [name for name in others if name not in files]
    return files, about, [f"not pushed, because the export did not write it: {', '.join(unknown)}"] if unknown else []
