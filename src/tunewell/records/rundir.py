"""The run folder: the paths of its files, a lock that allows only one process at a time, and `outcome.json`."""

import os
import re
import shlex
import traceback
from collections.abc import Iterable
from contextlib import suppress
from itertools import count as count_from
from pathlib import Path
from typing import Literal

from tunewell.core.errors import UserError
from tunewell.core.files import (
    FolderLock,
    make_private,
    require_output_path,
    running_owner,
    stable_json,
    write_atomic,
    write_synced,
)
from tunewell.core.redact import redact
from tunewell.core.units import count
from tunewell.records.base import Record, read_record
from tunewell.records.base_model import BASE
from tunewell.records.events import plain
from tunewell.records.healing import HEALING
from tunewell.records.plan import PLAN
from tunewell.records.prediction import Measurement, Prediction
from tunewell.records.report import Level

LOCK = ".lock"
"""The lock of a run folder. Its text names the process that works in it."""
PULSE = ".pulse"
"""The file with the current activity of a running process, written about once a second."""
STOP = ".stop"
"""The process that was asked to stop with `tunewell runs --stop`."""
RUN_CONFIG = "config.yaml"
"""The file with the settings of the last start of a run."""
DOCUMENTS = "documents.tsv"
"""The file with a short hash of every training document."""
_FIRST_FILES = (PLAN, BASE, RUN_CONFIG, DOCUMENTS, "events.jsonl", "samples.jsonl", HEALING, PULSE)
"""Files that a run writes before its first step."""
CRASH = "crash.log"
"""The traceback of the exception that ended a run; a later success removes it."""
_NOT_OURS = frozenset({LOCK, PULSE, STOP, ".DS_Store"})
_LEFTOVER = re.compile(r"\.probe\.\d+|\..+\.\d+\.tmp")
"""Files of `_check_writable` and `write_atomic` that a killed process leaves behind."""


class RunDir:
    """A run folder, locked by this process from `begin` or `reopen` until `close`.

    If a new run ends with a UserError before `keep` is called, its files are deleted, so that the corrected command can
    use the folder. After any other error, the files stay.
    """

    def __init__(self, path: Path, lock: FolderLock) -> None:
        self.path = path
        self._lock = lock
        self._is_kept = True
        self._is_ours = False

    @classmethod
    def begin(cls, path: Path, *, corpus: Path | None = None) -> "RunDir":
        """Create and lock the folder of a new run; raise UserError if it contains anything but the run's corpus."""
        require_output_path(path)
        if path.exists() and not path.is_dir():
            raise UserError(f"`{path}` is a file", fix="choose another folder with `--out`")
        known = _NOT_OURS | _parts_within(path, corpus)
        if path.is_dir() and not (path / LOCK).exists():
            _require_empty(path, known)  # check before a lock file is created among other files
        is_ours = not path.exists()
        run = cls._hold(path)
        try:
            _require_empty(path, known)
        except UserError:
            run.close()
            raise
        run._is_kept, run._is_ours = False, is_ours
        return run

    @classmethod
    def reopen(cls, path: Path) -> "RunDir":
        """Lock the folder of a run to resume it; raise UserError if it contains no run or is in use."""
        cls.require_run(path)
        return cls._hold(path)

    @staticmethod
    def require_new(path: Path, corpus: Path) -> None:
        """Raise UserError if the folder has a run or other files. Nothing is created."""
        if path.is_dir() and not running_owner(path / LOCK)[1]:
            _require_empty(path, _NOT_OURS | _parts_within(path, corpus))

    @staticmethod
    def require_run(path: Path) -> None:
        """Raise UserError if there is no run to resume."""
        if not (path / PLAN).is_file():
            what = f"there is no run in `{path}` to resume" if path.is_dir() else f"there is no run `{path}`"
            raise UserError(what, where=f"expected `{path / PLAN}`", fix="start a new run without `--resume`")

    @classmethod
    def _hold(cls, path: Path) -> "RunDir":
        try:
            make_private(path)
            lock = FolderLock.take(path / LOCK, doing=f"training in `{path}`")
            try:
                for entry in path.iterdir():  # temporary files of a killed process
                    if _LEFTOVER.fullmatch(entry.name) and entry.is_file():
                        entry.unlink(missing_ok=True)
                _check_writable(path)
            except OSError:
                lock.release()
                raise
        except OSError as error:
            raise UserError(
                f"the folder `{path}` cannot be written: {error.strerror}",
                fix="make the folder writable, or choose another folder with `--out`",
            ) from error
        return cls(path, lock)

    def write(self, name: str, text: str) -> None:
        """Write a text file of the run (`README.md`, `config.yaml`) atomically, without secrets."""
        write_atomic(self.path / name, redact(text))

    def keep(self) -> None:
        """Keep the files from now on, however the run ends. Called before the first step."""
        (self.path / OUTCOME).unlink(missing_ok=True)  # that of an earlier start of the run
        self._is_kept = True

    def close(self) -> None:
        """Release the lock; a second call does nothing."""
        self._lock.release()

    def __enter__(self) -> "RunDir":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is not None and issubclass(kind, UserError) and not self._is_kept:
            self._remove_files()
        elif error is not None and isinstance(error, Exception) and not isinstance(error, UserError):
            with suppress(OSError):  # the exception itself is reported in any case
                self.write(CRASH, "".join(traceback.format_exception(error)))
        elif error is None:
            (self.path / CRASH).unlink(missing_ok=True)
        self.close()

    def _remove_files(self) -> None:
        """Delete the first files of the run by name, because the folder may contain a corpus."""
        for name in _FIRST_FILES:
            with suppress(OSError):
                (self.path / name).unlink()
        with suppress(OSError):  # the folder is not empty
            (self.path / "checkpoints").rmdir()
        with suppress(OSError):
            if self._is_ours and [entry.name for entry in self.path.iterdir()] == [LOCK]:
                (self.path / LOCK).unlink()
                self.path.rmdir()


def free_name(run: Path) -> str:
    """Return a name beside a run that nothing has: `run2`, `run3`."""
    plain = re.sub(r"(?<=[A-Za-z])\d$", "", str(run).rstrip("/\\"))
    return next(name for number in count_from(2) if not Path(name := f"{plain}{number}").exists())


def train_again_command(run: Path | str, settings: Iterable[str], *, out: str | None = None) -> str:
    """Return the command for a new run beside this one that differs in some settings."""
    words = ["tunewell", "train", "--config", f"{run}/{RUN_CONFIG}", "--out", out or free_name(Path(run))]
    return shlex.join([*words, *(part for own in settings for part in ("--set", own))])


def _parts_within(path: Path, corpus: Path | None) -> frozenset[str]:
    """Return the names that `prepare` creates in the run folder if the corpus is inside it, else an empty set."""
    run, target = path.absolute(), (corpus or path).absolute()
    return frozenset({target.relative_to(run).parts[0], ".tunewell"}) if run in target.parents else frozenset()


def _require_empty(path: Path, known: frozenset[str]) -> None:
    entries = (entry.name for entry in path.iterdir() if not _LEFTOVER.fullmatch(entry.name))
    names = sorted(name for name in entries if name not in known)
    if not names:
        return
    has_run = PLAN in names
    more = f" and {count(len(names) - 5)} more" if len(names) > 5 else ""
    raise UserError(
        f"`{path}` already contains a run" if has_run else f"the folder `{path}` is not empty",
        where=", ".join(names[:5]) + more,
        fix=f"start another run with `--out {shlex.quote(free_name(path))}`, or resume this one with `--resume`"
        if has_run
        else "choose another folder with `--out` (the folder contains no run that `--resume` could continue)",
    )


def _check_writable(path: Path) -> None:
    probe = path / f".probe.{os.getpid()}"
    try:
        write_synced(probe, b"can this be written?\n")
    finally:
        probe.unlink(missing_ok=True)


# How the run ended.

OUTCOME = "outcome.json"

Status = Literal["finished", "interrupted", "stopped", "failed"]


class HeldOutLosses(Record):
    """The held-out losses, if there was an evaluation."""

    first: float | None = None
    last: float | None = None
    best: float | None = None


class Outcome(Record):
    """The outcome of a run. Losses that are not finite are written as the strings `nan`, `inf` and `-inf`."""

    format: str = "tunewell-outcome"
    format_version: int = 1
    made_by: str
    verdict: Level | None = None
    """The verdict of the validation after training; None before it, and without one."""
    status: Status
    """`finished`: all steps or early stopping; `interrupted`: signal; `stopped`: health rule; `failed`: error."""
    reason: str
    """The reason in one sentence."""
    steps: int
    """Finished optimizer steps, including those before a resume."""
    planned_steps: int
    first_loss: float | None = None
    last_loss: float | None = None
    held_out: HeldOutLosses = HeldOutLosses()
    best_step: int | None = None
    """The best step on the selection slice; None if checkpoints were not compared."""
    seconds: float
    """Duration since the last start or resume."""
    stages: dict[str, float] = {}
    """Seconds since the last start: prepare, plan, load, check, train (steps), look (evaluations), save, ..."""
    tokens: int
    """Tokens trained on, including those before a resume."""
    supervised_tokens: int = 0
    signal: str | None = None
    artefacts: dict[str, str] = {}
    """Written files, relative to the run folder."""
    allowed_changes: list[str] = []
    """Changes since the checkpoint that `--allow-change` allowed."""
    healing: list[str] = []
    """Problems, remedies and their cost, one line each; `healing.jsonl` has the numbers."""
    advice: list[str] = []
    """Changes to the config that are recommended for the next run."""
    predicted: Prediction | None = None
    """What the plan predicted."""
    measured: Measurement | None = None
    """What the process needed since its last start: peak memory and seconds by phase, the verdict included."""
    notes: list[str] = []
    """Warnings, such as checkpoints that could not be saved or damage that was ignored."""
    plugins: list[str] = []
    """Extensions of other packages that the run used, with package and version; left out if there are none."""


def write_outcome(folder: Path, outcome: Outcome) -> None:
    """Write the outcome atomically, without secrets."""
    left_out = None if outcome.plugins else {"plugins"}
    write_atomic(folder / OUTCOME, stable_json(plain(outcome.model_dump(exclude=left_out))))


def find_outcome(run: Path) -> Outcome | None:
    """Read the outcome of a run; return None if it has none. Raises UserError if it is damaged."""
    return read_record(run / OUTCOME, Outcome) if (run / OUTCOME).is_file() else None


def read_outcome(run: Path) -> Outcome:
    """Read the outcome of a run; raise UserError if it has none."""
    missing = f"there is no finished run in `{run}`"
    return read_record(run / OUTCOME, Outcome, missing=missing, fix="name the folder of a run")
