"""The folder of a run: what lies where, and that one process at a time works in it."""

import os
from contextlib import suppress
from pathlib import Path

from tunewell.core.errors import UserError
from tunewell.core.files import write_atomic, write_synced
from tunewell.core.lock import FolderLock
from tunewell.core.redact import redact
from tunewell.core.units import count
from tunewell.records.outcome import OUTCOME
from tunewell.records.plan import PLAN

_LOCK = ".lock"
RUN_CONFIG = "config.yaml"
"""The settings that a run was last started with."""
DOCUMENTS = "documents.tsv"
"""A short hash of every document that the run learns from."""
_NOT_OURS = frozenset({_LOCK, ".DS_Store"})


class RunDir:
    """A run's folder, held by this process from `begin` or `reopen` until `close`.

    A new run that is refused before `keep` was called leaves nothing behind, so that the corrected command can have its
    folder. Whatever else ends it, a bug above all, leaves what there is.
    """

    def __init__(self, path: Path, lock: FolderLock) -> None:
        self.path = path
        self._lock = lock
        self._is_kept = True
        self._is_ours = False

    @classmethod
    def begin(cls, path: Path, *, corpus: Path | None = None) -> "RunDir":
        """Make the folder of a new run and hold it; the run's own corpus may lie in it already.

        Raises UserError if something lies there, if another process holds it, or if it cannot be written.
        """
        if path.exists() and not path.is_dir():
            raise UserError(f"`{path}` is a file", fix="name another place with `--out`")
        known = _NOT_OURS | _parts_within(path, corpus)
        if path.is_dir() and not (path / _LOCK).exists():
            _refuse_filled(path, known)  # before a lock is laid among what may be other people's files
        is_ours = not path.exists()
        run = cls._hold(path)
        try:
            _refuse_filled(path, known)
        except UserError:
            run.close()
            raise
        run._is_kept, run._is_ours = False, is_ours
        return run

    @classmethod
    def reopen(cls, path: Path) -> "RunDir":
        """Hold the folder of a run that goes on.

        Raises UserError if no run lies there, if another process holds it, or if it cannot be written.
        """
        cls.refuse_absent(path)
        return cls._hold(path)

    @staticmethod
    def refuse_absent(path: Path) -> None:
        """Raise UserError if no run lies there to go on with."""
        if not (path / PLAN).is_file():
            what = f"there is no run in `{path}` to go on with" if path.is_dir() else f"there is no run `{path}`"
            raise UserError(what, where=f"looked for `{path / PLAN}`", fix="start one without `--resume`")

    @classmethod
    def _hold(cls, path: Path) -> "RunDir":
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = FolderLock.take(path / _LOCK, doing=f"training in `{path}`")
            try:
                _try_to_write(path)
            except OSError:
                lock.release()
                raise
        except OSError as error:
            raise UserError(
                f"the folder `{path}` cannot be written: {error.strerror}",
                fix="make it writable, or name another place with `--out`",
            ) from error
        return cls(path, lock)

    def write(self, name: str, text: str) -> None:
        """Write a text of the run (`README.md`, `config.yaml`) in one move, without secrets."""
        write_atomic(self.path / name, redact(text))

    def keep(self) -> None:
        """Say that the first step is about to be taken: from now on this is a run, however it ends."""
        self._is_kept = True

    def close(self) -> None:
        """Let the next one in; a second call does nothing."""
        self._lock.release()

    def __enter__(self) -> "RunDir":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, UserError) and not self._is_kept:
            self._take_back()
        self.close()

    def _take_back(self) -> None:
        """Remove what a run writes before its first step, by name: the folder was empty, but may hold a corpus now."""
        for path in (self.plan, self.config, self.documents, self.events, self.samples, self.healing):
            with suppress(OSError):
                path.unlink()
        with suppress(OSError):  # one that is not empty stays
            self.checkpoints.rmdir()
        with suppress(OSError):
            if self._is_ours and [entry.name for entry in self.path.iterdir()] == [_LOCK]:
                (self.path / _LOCK).unlink()
                self.path.rmdir()

    @property
    def plan(self) -> Path:
        """What the run does, and why."""
        return self.path / PLAN

    @property
    def config(self) -> Path:
        """The settings it was last started with."""
        return self.path / RUN_CONFIG

    @property
    def documents(self) -> Path:
        """What it learns from, as hashes."""
        return self.path / DOCUMENTS

    @property
    def events(self) -> Path:
        """One line per step and per look at the held-out rows."""
        return self.path / "events.jsonl"

    @property
    def healing(self) -> Path:
        """What went wrong and what was done about it."""
        return self.path / "healing.jsonl"

    @property
    def samples(self) -> Path:
        """Answers to held-out questions."""
        return self.path / "samples.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def outcome(self) -> Path:
        """How it ended."""
        return self.path / OUTCOME

    @property
    def readme(self) -> Path:
        """The run in words."""
        return self.path / "README.md"

    @property
    def loss_curve(self) -> Path:
        """The loss curve."""
        return self.path / "loss.svg"


def _parts_within(path: Path, corpus: Path | None) -> frozenset[str]:
    """Name what making a corpus leaves in a folder that it lies in; nothing where it lies elsewhere."""
    run, place = path.absolute(), (corpus or path).absolute()
    return frozenset({place.relative_to(run).parts[0], ".tunewell"}) if run in place.parents else frozenset()


def _refuse_filled(path: Path, known: frozenset[str]) -> None:
    names = sorted(entry.name for entry in path.iterdir() if entry.name not in known)
    if not names:
        return
    has_run = PLAN in names
    more = f" and {count(len(names) - 5)} more" if len(names) > 5 else ""
    raise UserError(
        f"a run lies in `{path}`" if has_run else f"the folder `{path}` is not empty",
        where=", ".join(names[:5]) + more,
        fix="go on with it by `--resume`, or name another place with `--out`"
        if has_run
        else "name another place with `--out` (`--resume` goes on with a run, and there is none)",
    )


def _try_to_write(path: Path) -> None:
    probe = path / f".probe.{os.getpid()}"
    try:
        write_synced(probe, b"can this be written?\n")
    finally:
        probe.unlink(missing_ok=True)
