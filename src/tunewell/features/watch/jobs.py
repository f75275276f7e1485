"""Work that the page starts: commands in processes of their own, with their output in files.

.tunewell/jobs/ID/   job.json (the command), lock (its process), out, err, code (once it has ended)

A job goes on when the server ends, and any later server finds it. Two starts on one device are refused.
"""

import json
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from tunewell.core.child import Process, start_detached
from tunewell.core.files import FolderLock, make_private, read_bytes, require_disk_space, running_owner, write_atomic
from tunewell.core.redact import redact
from tunewell.features.watch.errors import WatchError
from tunewell.features.watch.folder import HIDDEN, WatchedFolder
from tunewell.machine.machine import read_machine
from tunewell.records.rundir import LOCK
from tunewell.runs.state import StoredRun, find_runs, modified_at, read_object, value_in

USES_DEVICE = frozenset({"train", "resume", "validate"})
_ERROR = re.compile(r"^error: (?P<what>.*)(?:\n  where: (?P<where>.*))?(?:\n  fix: +(?P<fix>.*))?", re.MULTILINE)
_VERDICTS = frozenset({3, 4})
"""Exit codes of `train`, `validate` and `export` that are results, and no failures."""
_MAX_JOBS = 200
_SHOWN_BYTES = 1 << 16
_NEEDED_BYTES = 1 << 20


class Jobs:
    """The jobs of a folder."""

    def __init__(self, folder: WatchedFolder) -> None:
        self._folder = folder
        self._place = folder.root / HIDDEN / "jobs"
        self._children: list[Process] = []

    def start(
        self, kind: str, words: Sequence[str], *, run: str | None = None, has_token: bool = False
    ) -> dict[str, Any]:
        """Start `tunewell WORDS` in the folder, and return the job. Raises UserError if the disk is full.

        `has_token` gives it a token of its own, in a private file.
        """
        require_disk_space(self._folder.root, _NEEDED_BYTES)
        make_private(self._place)
        name = f"{datetime.now():%Y%m%d-%H%M%S-%f}"
        path = self._place / name
        path.mkdir(mode=0o700)
        now = datetime.now().astimezone().isoformat("T", "seconds")
        job = {"id": name, "kind": kind, "run": run, "command": shlex.join(["tunewell", *words]), "started": now}
        write_atomic(path / "job.json", json.dumps(job), is_private=True)
        if has_token:
            write_atomic(path / "token", secrets.token_urlsafe(32), is_private=True)
            words = [*words, "--token-file", str(path / "token")]
        command = [sys.executable, "-m", "tunewell.features.watch.job", str(path), *words]
        child = start_detached(command, out=path / "out", err=path / "err", folder=self._folder.root)
        self._children.append(child)
        owner = {"pid": child.pid, "host": socket.gethostname(), "since": now}
        write_atomic(path / "lock", json.dumps(owner), is_private=True)
        self._forget_old()
        return self.job(name)

    def job(self, name: str) -> dict[str, Any]:
        """Return a job with what it has written; raise WatchError if there is none."""
        path = self.path(name)
        is_running = self._owner(path)[1]  # first: the code is written before the process ends
        code, err = _number(path / "code"), text_of(path / "err") or ""
        result = read_object(path / "out") if code is not None else {}
        if code is None:
            status = "running" if is_running else "lost"
        elif code in _VERDICTS and "error" not in result:
            status = "done"
        else:
            status = {0: "done", 130: "stopped", 143: "stopped"}.get(code, "failed")
        error = None
        words = next((line.strip() for line in reversed(err.splitlines()) if line.strip()), None)
        if status in ("failed", "lost"):
            told = [*_ERROR.finditer(err)]
            what = told[-1].groupdict() if told else {"what": words or "the command ended without a result"}
            error = {"where": None, "fix": None} | (result.get("error") or what)
        return redact(self._known(name) | {"id": name, "status": status, "error": error, "words": words})

    def path(self, name: str) -> Path:
        """Return the folder of a job."""
        if not name.replace("-", "").isalnum() or not (self._place / name / "job.json").is_file():
            raise WatchError("not_found", f"there is no job `{name[:40]}`")
        return self._place / name

    def running(self) -> list[dict[str, Any]]:
        """Return the jobs that have not ended."""
        return [self.job(name) for name in self._names() if self._owner(self._place / name)[1]]

    def newest_of(self, run: str, kinds: Sequence[str] = ("train", "resume")) -> dict[str, Any] | None:
        """Return the newest job of a run."""
        for name in self._names():
            known = self._known(name)
            if known["run"] == run and known["kind"] in kinds:
                return self.job(name)
        return None

    def _known(self, name: str) -> dict[str, Any]:
        """Return what a job was started with; a damaged one belongs to no run."""
        known = read_object(self._place / name / "job.json")
        return known if known.keys() >= {"kind", "run", "command", "started"} else {"kind": "", "run": None}

    def signature(self) -> list[Any]:
        """Return a value that changes when a job does."""
        paths = [self._place / name for name in self._names()[:20]]
        return [[path.name, self._owner(path)[1], modified_at(path / "err")] for path in paths]

    def stop(self, name: str) -> None:
        """Ask a job to end."""
        owner, is_running = self._owner(self.path(name))
        if owner is not None and is_running:
            with suppress(ProcessLookupError):
                os.kill(owner.pid, signal.SIGTERM)

    def _names(self) -> list[str]:
        with suppress(OSError):
            return sorted((own.name for own in os.scandir(self._place) if own.is_dir()), reverse=True)
        return []

    def _owner(self, path: Path) -> tuple[Any, bool]:
        self._reap()
        owner, is_running = running_owner(path / "lock")
        return owner, is_running and not (path / "code").exists()

    def _reap(self) -> None:
        self._children = [child for child in self._children if child.poll() is None]

    def _forget_old(self) -> None:
        for name in self._names()[_MAX_JOBS:]:
            if not self._owner(self._place / name)[1]:
                shutil.rmtree(self._place / name, ignore_errors=True)

    # The device: one run at a time.

    def holder(self) -> WatchError | None:
        """Return why no run can be started on the device now: the run or the job that holds it. None: it is free."""
        device, host = read_machine().device("auto").name.removesuffix(":0"), socket.gethostname()
        for path in find_runs(self._folder.root):
            run = StoredRun(path)
            own = value_in(run.plan, "device", "value", kind=str) or device
            if run.is_running and run.owner and run.owner.host == host and own.removesuffix(":0") == device:
                return _busy(self._folder.name_of(path), str(run.owner))
        for job in self.running():
            if job["kind"] in USES_DEVICE:
                return _busy(job["run"], f"`{job['command']}`, since {job['started']}")
        return None

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Let one server at a time look whether the device is free, and start; raise WatchError if it is not."""
        make_private(self._place)
        with FolderLock.take(self._place / LOCK, doing="starting a run in this folder"):
            if error := self.holder():
                raise error
            yield


def _busy(run: str, where: str) -> WatchError:
    fix = f"wait until it ends, or stop it: `tunewell runs {shlex.quote(run)} --stop`"
    return WatchError("busy", f"the run `{run}` holds the device", where=where, fix=fix)


def _number(path: Path) -> int | None:
    try:
        return int(read_bytes(path))
    except (OSError, ValueError):
        return None


def text_of(path: Path) -> str | None:
    """Return the end of a text file, or None if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(-min(_SHOWN_BYTES, path.stat().st_size), os.SEEK_END)
            return file.read().decode(errors="replace")
    except OSError:
        return None
