"""`tunewell push`: upload a verified export, or the report of a run, to object storage or to the hub."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tunewell.config.rules import Storage
from tunewell.core.errors import UserError
from tunewell.core.files import link_or_copy, stable_json
from tunewell.core.progress import Progress, ProgressListener, silent
from tunewell.features.remote.address import BUCKET_SCHEMES
from tunewell.features.remote.hub import push_to_hub, repository_of
from tunewell.features.remote.push import MANIFEST, Pushed, push_files, push_manifest
from tunewell.features.remote.push_export import collect


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
    content = collect(Path(place).expanduser())
    progress(Progress("hashing"))
    files = content.hashed()
    sizes = {name: file.size for name, file in files.items()}
    if is_dry_run:
        folder = out or Path(f"{Path(place).resolve().name}-push")
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"the folder `{folder}` is not empty", fix="choose another one with `--out`")
        for name, file in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(file.path, folder / name)
        (folder / MANIFEST).write_text(stable_json(push_manifest(files, content.about)), encoding="utf-8")
        return PushResult(to, sizes, None, folder, content.notes)
    if scheme == "hf":
        pushed = push_to_hub(to, files, content.about, is_public=is_public, progress=progress)
    else:
        pushed = push_files(to, files, content.about, settings=storage or Storage(), progress=progress)
    return PushResult(to, sizes, pushed, notes=content.notes)
