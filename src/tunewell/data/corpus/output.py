"""The output folder of `prepare`: is it current, may it be replaced, and its work folder with a lock."""

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tunewell.core.errors import UserError
from tunewell.core.files import (
    FolderLock,
    disk_full_as_user_error,
    has_unfinished_publish,
    is_disk_full,
    make_private,
    recover_publish,
    require_output_path,
)
from tunewell.data.corpus.reader import open_corpus
from tunewell.data.corpus.spec import BuildSpec
from tunewell.records.manifest import CORPUS_NAMES, MANIFEST, DamagedManifest, Manifest, read_manifest

_CORPUS_MARKERS = frozenset({"dataset_dict.json", "dropped.jsonl", "train"})
"""Files that identify a folder as a corpus if the manifest is missing."""
_SMALL_FILES_BYTES = 4096


class CorpusOutput:
    """The folder of a corpus and its work folder. Both are on the same disk, so that the corpus can be moved."""

    def __init__(self, target: Path) -> None:
        require_output_path(target)
        self.target = target
        self.path = target.resolve()  # replace the folder that a symlink points to, not the symlink
        self.work_dir = self.path.parent / ".tunewell" / f"prepare-{self.path.name}"

    def find_current(self, spec: BuildSpec) -> Manifest | None:
        """Return the manifest of the existing corpus if it is intact and was built from the same inputs."""
        try:
            manifest = read_manifest(self.path)
            if manifest.inputs_sha256 != spec.inputs_sha256 or manifest.made_by != spec.made_by:
                return None
            return open_corpus(self.path, verify=True).manifest
        except UserError:
            return None  # missing or damaged; the corpus is rebuilt from the cached blocks

    def require_replaceable(self) -> None:
        """Raise UserError if the folder contains anything that `prepare` did not write."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"`{self.target}` is a file", fix="choose another folder with `--out`")
        names = {entry.name for entry in self.path.iterdir()} - {".DS_Store"} if self.path.is_dir() else set[str]()
        foreign = sorted(names - CORPUS_NAMES)
        if foreign or (names and not self._is_corpus(names)):
            raise UserError(
                f"the folder `{self.target}` is not a corpus, so it will not be overwritten",
                where=", ".join((foreign or sorted(names))[:5]),
                fix="choose another folder with `--out`, or move those files away",
            )

    def _is_corpus(self, names: set[str]) -> bool:
        if MANIFEST in names:
            try:
                read_manifest(self.path)
                return True
            except DamagedManifest:
                pass
        return names >= _CORPUS_MARKERS

    def has_leftovers(self) -> bool:
        """Return True if an interrupted `prepare` left unfinished files."""
        return has_unfinished_publish(self.path) or self._staging_dir.exists()

    @contextmanager
    def locked(self) -> Generator[None]:
        """Lock the work folder and clean up after an interrupted `prepare`; raise UserError if it is already locked."""
        existing = next(folder for folder in self.work_dir.parents if folder.exists())
        with disk_full_as_user_error(existing, lambda: _SMALL_FILES_BYTES):
            self._make_work_dir()
            with FolderLock.take(self.work_dir / "lock", doing=f"preparing `{self.target}`"):
                recover_publish(self.path)
                if self._staging_dir.exists():
                    shutil.rmtree(self._staging_dir)
                yield

    def _make_work_dir(self) -> None:
        try:
            make_private(self.work_dir.parent)
            make_private(self.work_dir)
            (self.work_dir.parent / ".gitignore").write_text("*\n", encoding="utf-8")
        except OSError as error:
            if is_disk_full(error):
                raise
            raise UserError(
                f"the folder `{self.target}` cannot be written: {error.strerror}",
                fix="make its parent folder writable, or choose another folder with `--out`",
            ) from error

    @property
    def _staging_dir(self) -> Path:
        return self.work_dir / "staging"
