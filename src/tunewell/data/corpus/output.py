"""The output folder of a corpus: is it up to date, may it be replaced, and how much disk space does a build need."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tunewell.core.errors import UserError
from tunewell.core.files import disk_full_as_user_error, has_unfinished_publish, recover_publish
from tunewell.core.lock import FolderLock
from tunewell.data.corpus.reader import open_corpus
from tunewell.data.corpus.shards import BYTES_PER_TOKEN
from tunewell.data.corpus.spec import BuildSpec
from tunewell.records.manifest import CORPUS_NAMES, MANIFEST, DamagedManifest, Manifest, read_manifest

_CORPUS_MARKERS = frozenset({"dataset_dict.json", "dropped.jsonl", "train"})
"""Files that identify a corpus folder without a manifest."""
_SMALL_FILES_BYTES = 4096


class CorpusOutput:
    """The folder of a corpus, and the work folder beside it, on the same disk so that the corpus can be moved in."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = target.resolve()  # replace the folder that a symlink points to, not the symlink
        self.work_dir = self.path.parent / ".tunewell" / f"prepare-{self.path.name}"

    def find_current(self, spec: BuildSpec) -> Manifest | None:
        """Return the manifest of the existing corpus if it is intact and equal to what the spec would build."""
        try:
            manifest = read_manifest(self.path)
            if manifest.inputs_sha256 != spec.inputs_sha256 or manifest.made_by != spec.made_by:
                return None
            return open_corpus(self.path, verify=True).manifest
        except UserError:
            return None  # missing or damaged: it is built again from the cached blocks

    def require_replaceable(self) -> None:
        """Raise UserError if the folder contains anything that `prepare` did not write."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"`{self.target}` is a file", fix="choose another folder with `--out`")
        names = {entry.name for entry in self.path.iterdir()} - {".DS_Store"} if self.path.is_dir() else set()
        foreign = sorted(names - CORPUS_NAMES)
        if foreign or (names and not self._is_corpus(names)):
            raise UserError(
                f"the folder `{self.target}` is not a corpus and is not overwritten",
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
        """Return True if a killed `prepare` left unfinished files."""
        return has_unfinished_publish(self.path) or self._staging_dir.exists()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the work folder while the body runs, and remove what a killed `prepare` left.

        Raises UserError if another process holds the lock.
        """
        existing = next(folder for folder in self.work_dir.parents if folder.exists())
        with disk_full_as_user_error(existing, lambda: _SMALL_FILES_BYTES):
            self.work_dir.mkdir(parents=True, exist_ok=True)
            (self.work_dir.parent / ".gitignore").write_text("*\n", encoding="utf-8")
            with FolderLock.take(self.work_dir / "lock", doing=f"preparing `{self.target}`"):
                recover_publish(self.path)
                if self._staging_dir.exists():
                    shutil.rmtree(self._staging_dir)
                yield

    @property
    def _staging_dir(self) -> Path:
        return self.work_dir / "staging"


_SOURCE_BYTES_PER_TOKEN = 3
"""A low estimate until the first tokens are counted: English chat has about four."""
_CACHED_BYTES = 5
"""Per token in a cached block: its id and a little more."""
_STAGED_BYTES = 5
"""Per token in the staging files: its id and its mask."""
_REST_BYTES = 8 << 20
"""All other files: tokenizer, index, data card."""


@dataclass
class SpaceEstimate:
    """Estimates the disk space of a build from what was read so far."""

    source_bytes: int
    read_bytes: int = 0
    tokens: int = 0
    is_read: bool = False

    def shard_bytes(self) -> int:
        """Return the size of all shards; exact once every token is counted."""
        return self.tokens * BYTES_PER_TOKEN

    def bytes_for_retry(self) -> int:
        """Estimate what a retry would write: missing cached blocks, staging files, shards and the rest."""
        total = float(self.tokens)
        if not self.is_read:
            share_read = self.read_bytes / self.source_bytes if self.source_bytes else 1.0
            guess = self.source_bytes / _SOURCE_BYTES_PER_TOKEN
            total = max(self.tokens / share_read if self.tokens else guess, total)
        cached = (total - self.tokens) * _CACHED_BYTES
        return int(cached + total * (_STAGED_BYTES + BYTES_PER_TOKEN)) + _REST_BYTES
