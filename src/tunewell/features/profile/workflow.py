"""`tunewell profile`: measure some steps in a child process, or read a finished run; find and try the best remedy."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunewell.config.load import LoadedConfig
from tunewell.core.errors import UserError
from tunewell.core.files import stable_json, write_atomic
from tunewell.core.progress import Progress, ProgressListener
from tunewell.core.version import made_by
from tunewell.data.corpus.reader import open_corpus
from tunewell.features.profile.bottlenecks import ProfileResult, find_bottlenecks
from tunewell.features.profile.records import Profile
from tunewell.records.base import read_record
from tunewell.runs.config import RunOptions

if TYPE_CHECKING:
    from tunewell.training.run import Run
    from tunewell.workflows.train import Training

_PROFILE = "profile.json"
_MEMORY_DISK = Path("/dev/shm")


class ChildFailed(Exception):
    """The child printed an error and exited with this code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def profile_config(loaded: LoadedConfig, argv: Sequence[str], *, applies: bool) -> ProfileResult:
    """Profile some steps of a config in a child process; with `applies`, again with the best remedy.

    Raises ChildFailed if the child printed an error, and UserError if it was killed. Nothing is left behind.
    """
    with _scratch(loaded) as scratch:
        profile = _run_child(argv, scratch, None)
        result = ProfileResult(profile, find_bottlenecks(profile))
        if not applies or not result.bottlenecks:
            return result
        best = result.bottlenecks[0]
        value = json.dumps(str(scratch.copy)) if best.key == "corpus" else best.value
        return replace(result, applied=_run_child(argv, scratch, f"{best.key}={value}"))


@dataclass(frozen=True)
class _Scratch:
    folder: Path
    """On the disk of the run, so that checkpoints take as long as there."""
    copy: Path
    """A folder in memory for a copy of the corpus, if there is one."""


@contextmanager
def _scratch(loaded: LoadedConfig) -> Iterator[_Scratch]:
    near = loaded.path(loaded.config.run).absolute().parent
    parent = near if near.is_dir() and os.access(near, os.W_OK) else None
    memory = _MEMORY_DISK if os.access(_MEMORY_DISK, os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix=".tunewell-profile-", dir=parent) as folder,
        tempfile.TemporaryDirectory(prefix="tunewell-profile-", dir=memory) as copies,
    ):
        yield _Scratch(Path(folder), Path(copies) / "corpus")


def _run_child(argv: Sequence[str], scratch: _Scratch, trial: str | None) -> Profile:
    result = scratch.folder / _PROFILE
    result.unlink(missing_ok=True)
    added = ["--child", str(scratch.folder), "--copies", str(scratch.copy), *(["--try", trial] if trial else [])]
    # Before the user's arguments, which may end with `--`.
    command = [sys.executable, "-m", "tunewell", "profile", *added, *argv]
    # torch's profiler announces itself on stderr.
    done = subprocess.run(command, env={"KINETO_LOG_LEVEL": "99", **os.environ}, check=False)
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        fix = "reduce `train.micro_batch_tokens`, or close other programs" if name == "SIGKILL" else None
        raise UserError(f"the process that was measured was killed by {name}", where="most often for memory", fix=fix)
    if done.returncode or not result.is_file():
        raise ChildFailed(done.returncode or 1)
    return read_record(result, Profile)


@dataclass(frozen=True)
class Job:
    """What the child measures."""

    folder: Path
    copies: Path
    num_steps: int
    keeps_waits: bool = False
    """Whether the time that other programs use the processor counts, as it does for too many threads."""


def measure(loaded: LoadedConfig, options: RunOptions, job: Job, listener: ProgressListener) -> None:
    """Measure in this process, the child, and write the result to the folder of the job."""
    from tunewell.runs.folder import open_run_folder
    from tunewell.training.events import Event
    from tunewell.workflows.train import Training, require_trainable

    config = loaded.config.model_copy(update={"run": str((job.folder / "run").absolute())})
    loaded, start = require_trainable(replace(loaded, config=config), options)

    def listen(event: Event) -> None:
        if isinstance(event, Progress) and event.stage != "saving a checkpoint":
            listener(event)

    training = Training(loaded, options, listen, start)
    if training.world.size > 1:
        raise UserError("a profile runs in one process", fix="start it without `torchrun`")
    shutil.rmtree(job.folder / "run", ignore_errors=True)
    with open_run_folder(loaded, training.world, is_resuming=False) as opened:
        training.prepare()
        corpus, plan, order = training.plan(opened)
        with training.process_settings(plan):
            _, run = training.build(opened, corpus, plan, order)
            opened.keep()
            result = _measure_steps(run, training, job)
        run.close()
    write_atomic(job.folder / _PROFILE, stable_json(result.model_dump(mode="json")))


def _measure_steps(run: "Run", training: "Training", job: Job) -> Profile:
    from tunewell.features.profile.trial import ProfileStopped, profile_steps

    corpus = training.loaded.path(training.loaded.config.corpus)
    training.recorder(Progress(f"measuring {job.num_steps} steps"))
    try:
        return profile_steps(
            run,
            job.num_steps,
            made_by=made_by(),
            device_label=training.device.label,
            keeps_waits=job.keeps_waits,
            copy=_copier(corpus, job.copies, training.hooks.documents),
        )
    except ProfileStopped as stopped:
        raise UserError(f"the run stopped before {job.num_steps} steps were measured: {stopped}") from stopped


def _copier(corpus: Path, copies: Path, documents: Callable[[Any], Any]) -> Callable[[], Any]:
    """Return a function that copies the corpus and returns its documents; None if the copy is not on another disk."""

    def copy() -> Any:
        size = sum(file.stat().st_size for file in corpus.rglob("*") if file.is_file())
        is_other = copies.parent.stat().st_dev != corpus.stat().st_dev
        if not is_other or shutil.disk_usage(copies.parent).free < 2 * size:
            return None
        shutil.copytree(corpus, copies, dirs_exist_ok=True)
        return documents(open_corpus(copies))

    return copy
