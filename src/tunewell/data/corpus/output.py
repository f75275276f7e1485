"""The place a corpus is put: whether the right one lies there already, and whether what lies there may be replaced."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tunewell.core.errors import UserError
from tunewell.core.files import publish_was_cut_short, told_when_full, undo_publish
from tunewell.core.lock import only_one
from tunewell.data.corpus.reader import open_corpus
from tunewell.data.corpus.spec import BuildSpec
from tunewell.data.corpus.writer import BYTES_PER_TOKEN
from tunewell.records.manifest import CORPUS_NAMES, MANIFEST, DamagedManifest, Manifest, read_manifest

_MARKS = frozenset({"dataset_dict.json", "dropped.jsonl", "train"})
"""What tells a corpus that lost its manifest from other people's folders."""
_SMALL_FILES_BYTES = 4096


class CorpusOutput:
    """Where a corpus goes, and the folder beside it where it is made: on one disk, so that it can be moved whole."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.home = target.resolve()  # where a link leads is replaced, not the link
        self.work = self.home.parent / ".tunewell" / f"prepare-{self.home.name}"

    def up_to_date(self, order: BuildSpec) -> Manifest | None:
        """Give the manifest of the corpus that lies there if it is whole and what the order would make."""
        try:
            manifest = read_manifest(self.home)
            if manifest.inputs_sha256 != order.inputs_sha256 or manifest.made_by != order.made_by:
                return None
            return open_corpus(self.home, verify=True).manifest
        except UserError:
            return None  # not there, or damaged since: made anew from the cached parts

    def refuse_foreign(self) -> None:
        """Raise UserError if anything lies there that `prepare` did not put there."""
        if self.home.exists() and not self.home.is_dir():
            raise UserError(f"`{self.target}` is a file", fix="name another place with `--out`")
        names = {entry.name for entry in self.home.iterdir()} - {".DS_Store"} if self.home.is_dir() else set()
        foreign = sorted(names - CORPUS_NAMES)
        if foreign or (names and not self._is_corpus(names)):
            raise UserError(
                f"the folder `{self.target}` holds something that is not a corpus, so it is not replaced",
                where=", ".join((foreign or sorted(names))[:5]),
                fix="name another place with `--out`, or move those files away",
            )

    def _is_corpus(self, names: set[str]) -> bool:
        if MANIFEST in names:
            try:
                read_manifest(self.home)
                return True
            except DamagedManifest:
                pass
        return names >= _MARKS

    def has_leftovers(self) -> bool:
        """Tell whether a prepare was killed here and left something half done."""
        return publish_was_cut_short(self.home) or self._staging.exists()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep others out while the body builds, and clean up after a prepare that was killed.

        Raises UserError if another process is at work here.
        """
        existing = next(folder for folder in self.work.parents if folder.exists())
        with told_when_full(existing, lambda: _SMALL_FILES_BYTES):
            self.work.mkdir(parents=True, exist_ok=True)
            (self.work.parent / ".gitignore").write_text("*\n", encoding="utf-8")
            with only_one(self.work / "lock", doing=f"preparing `{self.target}`"):
                undo_publish(self.home)
                if self._staging.exists():
                    shutil.rmtree(self._staging)
                yield

    @property
    def _staging(self) -> Path:
        return self.work / "staging"


# How much room on the disk a build needs.

_SOURCE_BYTES_PER_TOKEN = 3
"""A low guess, for the time before the first token is known: English chat has about four."""
_CACHED_BYTES = 5
"""Of a token in a part: its id and a little more."""
_STAGED_BYTES = 5
"""Of a token between reading and packing: its id and its mask."""
_REST_BYTES = 8 << 20
"""Of all else: tokenizer, index, card."""


@dataclass
class Space:
    """What was read so far, and what that says about the whole."""

    source_bytes: int
    read_bytes: int = 0
    tokens: int = 0
    is_read: bool = False

    def shard_bytes(self) -> int:
        """Give the size of all shards, once every token is known."""
        return self.tokens * BYTES_PER_TOKEN

    def bytes_for_another_try(self) -> int:
        """Estimate what a run would write now: parts that are not there yet, staged tokens, shards and the rest."""
        total = float(self.tokens)
        if not self.is_read:
            share_read = self.read_bytes / self.source_bytes if self.source_bytes else 1.0
            guess = self.source_bytes / _SOURCE_BYTES_PER_TOKEN
            total = max(self.tokens / share_read if self.tokens else guess, total)
        cached = (total - self.tokens) * _CACHED_BYTES
        return int(cached + total * (_STAGED_BYTES + BYTES_PER_TOKEN)) + _REST_BYTES
