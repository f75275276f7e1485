"""What the server knows while it runs: the folder, its jobs, indices of logs, and models that chat. All can be lost."""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.features import features
from tunewell.core.files import running_owner
from tunewell.features.watch.errors import WatchError
from tunewell.features.watch.folder import WatchedFolder
from tunewell.features.watch.jobs import Jobs
from tunewell.features.watch.reader import Reader
from tunewell.records.plan import PLAN
from tunewell.records.report import REPORT
from tunewell.records.rundir import LOCK, OUTCOME
from tunewell.runs.follow import StepIndex
from tunewell.runs.state import EVENTS, StoredRun, find_runs

_MAX_INDICES = 16
"""Logs whose index is kept; that of 100,000 steps has 2.4 MB."""


@dataclass
class Watched:
    """The folder of a server."""

    root: Path
    is_read_only: bool = False
    guard: threading.Lock = field(default_factory=threading.Lock)
    reader: Reader = field(default_factory=Reader)
    is_over: Callable[[], bool] = lambda: False
    """Whether the server ends. Streams end with it, and jobs go on."""

    def __post_init__(self) -> None:
        self._rows: dict[Path, tuple[Any, StoredRun]] = {}
        self._indices: OrderedDict[Path, StepIndex] = OrderedDict()

    @cached_property
    def folder(self) -> WatchedFolder:
        return WatchedFolder(self.root)

    @cached_property
    def jobs(self) -> Jobs:
        return Jobs(self.folder)

    @property
    def features(self) -> dict[str, bool]:
        """The parts that other features add, and whether they are there."""
        wanted = {"chat": "serve", "index": "retrieval", "diagnose": "diagnose"}
        return {part: name in features() for part, name in wanted.items()}

    def run(self, name: str) -> Path:
        """Return the folder of a run, also of one that begins; raise WatchError if a file in it is a link out of it."""
        path = self.folder.below(name)
        if not ((path / PLAN).is_file() or (path / EVENTS).is_file()):
            if self.jobs.newest_of(name) is None:
                what = f"there is no run `{name[:200]}`: it was deleted or moved, or never existed"
                raise WatchError("not_found", what, fix="choose a run in the list")
        else:
            self._require_no_links_out(path)
        return path

    def asked(self, query: Mapping[str, Any]) -> Path:
        """Return the folder of the run that a request names."""
        return self.run(str(query.get("id", ".")))

    def _require_no_links_out(self, run: Path) -> None:
        for entry in os.scandir(run):
            if entry.is_symlink():
                self.folder.below(entry.path)

    def stored_runs(self) -> dict[Path, StoredRun]:
        """Return the runs in the folder. Only those whose files have changed are read again."""
        with self.guard:
            found: dict[Path, tuple[Any, StoredRun]] = {}
            begun = [self.root / str(job["run"]) for job in self.jobs.running() if job["kind"] == "train"]
            for path in dict.fromkeys([*find_runs(self.root), *begun]):
                signature, known = run_signature(path), self._rows.get(path)
                if known is None or known[0] != signature:
                    with suppress(OSError, UserError):  # it was deleted, or a file of it is a link out of the folder
                        if self.folder.below(str(path)).is_dir():
                            self._require_no_links_out(path)
                        found[path] = signature, StoredRun(path)
                        found[path][1].run = self.folder.name_of(path)
                else:
                    found[path] = known
            self._rows = found
            return {path: run for path, (_, run) in found.items()}

    def index(self, run: Path) -> tuple[StepIndex, threading.Lock]:
        """Return the index of the log of a run, which is used under the lock."""
        with self.guard:
            index = self._indices.pop(run, None) or StepIndex(run / EVENTS)
            self._indices[run] = index
            while len(self._indices) > _MAX_INDICES:
                self._indices.popitem(last=False)
        return index, self.guard


def run_signature(run: Path) -> list[Any]:
    """Return a value that changes when a file of a run does, or when its process ends."""
    stats: list[Any] = [running_owner(run / LOCK)]
    for name in (EVENTS, OUTCOME, REPORT, PLAN):
        try:
            found = (run / name).stat()
            stats.append((found.st_ino, found.st_size, found.st_mtime_ns))
        except OSError:
            stats.append(None)
    return stats
