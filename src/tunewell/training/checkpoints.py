"""Save a run while it goes on, so that it can go on after anything: a checkpoint is whole or absent.

    step-000123.tmp/  files, each flushed -> manifest.json with every hash -> read back -> flushed -> step-000123/

Training waits only while the state is copied; one thread writes. Nothing old is removed before the new one is whole.
"""

import hashlib
import platform
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import safetensors.torch

from tunewell import __version__
from tunewell.core.files import is_disk_full, publish_folder, recover_publish, sync_folder, write_synced
from tunewell.core.redact import redact
from tunewell.core.units import count, size_bytes
from tunewell.records.checkpoint import (
    STAGED,
    CheckpointManifest,
    DamagedCheckpoint,
    FileRecord,
    checkpoint_name,
    checkpoint_step,
    verify,
    write_manifest,
)
from tunewell.training.saved_checkpoints import (
    Saved,
    Snapshot,
    State,
    find_best,
    find_newest,
    load_state,
    newest_best_step,
    saved_steps,
)

# Write a whole checkpoint into a folder that nobody reads yet, and read it back.

_LIBRARIES = ("torch", "safetensors")


def write_checkpoint(folder: Path, snapshot: Snapshot, *, best_step: int | None) -> list[str]:
    """Write every file, each flushed, the manifest last, and hold what lies there against it.

    Gives the names of the texts that secrets were taken out of. Raises OSError, or DamagedCheckpoint when the disk
    gives back other bytes than it got.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    files, redacted = {}, []
    for name, tensors in snapshot.tensors.items():
        files[name] = _write(folder / name, safetensors.torch.save(tensors))
    for name, text in snapshot.texts.items():
        clean = redact(text)
        files[name] = _write(folder / name, clean.encode("utf-8", "surrogatepass"))
        if clean != text:
            redacted.append(name)
    for inner in sorted({(folder / name).parent for name in files} - {folder}):
        sync_folder(inner)
    manifest = CheckpointManifest(
        made_by=f"tunewell {__version__}",
        step=snapshot.step,
        best_step=best_step,
        files=files,
        identity=snapshot.identity,
        progress=snapshot.progress,
        versions={"python": platform.python_version(), **{name: version(name) for name in _LIBRARIES}},
    )
    write_manifest(folder, manifest)
    verify(folder)
    return redacted


def _write(path: Path, data: bytes) -> FileRecord:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_synced(path, data)
    return FileRecord(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


_LEAST_KEPT = 2
_TRIES = 3
_WAIT_SECONDS = 0.1


class Checkpoints:
    """The checkpoints of one run, written by the process that holds the run's folder.

    `on_trouble` gets one line for each thing that goes wrong, once and not at each try; it may be called from the
    thread that writes. Other processes read with `find_newest`, `find_best` and `load_state`.
    """

    def __init__(self, folder: Path, *, keep: int, on_trouble: Callable[[str], None]) -> None:
        self.folder = folder
        self.trouble: str | None = None
        """Why the last save did not make it to the disk; None when it did."""
        self._keep = max(keep, _LEAST_KEPT)
        self._tell = on_trouble
        self._num_missed = 0
        self._whole: set[int] = set()
        self._undeletable: set[int] = set()
        self._held_before: int | None = None
        self._redacted: set[str] = set()
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoints")
        self._pending: Future[None] | None = None
        folder.mkdir(exist_ok=True)
        self._clean_up()
        self._best = newest_best_step(folder)

    def save(self, state: State, *, is_best: bool = False, wait: bool = False) -> None:
        """Copy the state now and write it in the background, after the save before it.

        What cannot be saved is told, and the run goes on with the checkpoint it has: a full disk, a folder that
        vanished, a tensor that is not finite. Whatever has a later step is of a future that was left, and goes.
        """
        self.wait()
        self._pending = self._writer.submit(self._save, Snapshot(state), is_best)
        if wait:
            self.wait()

    def hold_before(self, step: int) -> None:
        """Keep the newest checkpoint of at most so many steps too: there the run was well, should it not stay so."""
        self._held_before = step

    def wait(self) -> None:
        """Wait until what was saved is on the disk, or was told not to be."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def newest(self) -> Saved | None:
        """Give the newest whole checkpoint; damaged ones are told and passed over.

        None if there has been none. Raises UserError if there are some and none is whole.
        """
        self.wait()
        return find_newest(self.folder, on_trouble=self._tell)

    def best(self) -> Saved | None:
        """Give the checkpoint with the best held-out loss; None if none was looked at, or if it is damaged."""
        self.wait()
        return find_best(self.folder, on_trouble=self._tell)

    def load(self, saved: Saved, *, needs: Iterable[str] = ()) -> State:
        """Read a checkpoint, from which the run goes on; raise UserError when it lacks one of the files it `needs`."""
        self.wait()
        state = load_state(saved, needs=needs)
        self._best = saved.manifest.best_step
        return state

    def remove_after(self, step: int) -> None:
        """Remove what was saved after a step: the run goes another way from there."""
        self.wait()
        for later in saved_steps(self.folder):
            if later > step:
                self._remove(later)
        self._best = newest_best_step(self.folder)

    def _save(self, snapshot: Snapshot, is_best: bool) -> None:
        snapshot.wait()
        name = checkpoint_name(snapshot.step)
        if spoiled := snapshot.not_finite():
            self._miss(f"{spoiled} is not finite", name)
            return
        best = snapshot.step if is_best else self._best
        staged = self.folder / (name + STAGED)
        for attempt in range(1, _TRIES + 1):
            try:
                self._stage(snapshot, staged, best)
                publish_folder(staged, self.folder / name)
                break
            except (OSError, DamagedCheckpoint) as error:
                shutil.rmtree(staged, ignore_errors=True)
                is_hopeless = isinstance(error, OSError) and is_disk_full(error)
                if is_hopeless or attempt == _TRIES:
                    self._miss(_reason(error), name)
                    return
                time.sleep(_WAIT_SECONDS * attempt)
        if self._num_missed:
            self._tell(f"checkpoints are saved again, from `{name}` on; {count(self._num_missed)} could not be")
        self.trouble, self._num_missed, self._best = None, 0, best
        self._whole.add(snapshot.step)
        self._rotate(snapshot.step)

    def _stage(self, snapshot: Snapshot, staged: Path, best: int | None) -> None:
        if not self.folder.is_dir():
            self.folder.mkdir()
            self._tell(f"the folder `{self.folder.name}` had vanished, with every checkpoint in it, and was made anew")
        for name in write_checkpoint(staged, snapshot, best_step=best):
            if name not in self._redacted:
                self._redacted.add(name)
                self._tell(f"a secret was left out of `{name}` in the checkpoints")

    def _miss(self, reason: str, name: str) -> None:
        is_new = self.trouble != reason
        self.trouble = reason
        self._num_missed += 1
        if is_new:
            self._tell(f"checkpoint `{name}` was not saved: {reason}; the run goes on, and the one before stays")

    def _rotate(self, newest: int) -> None:
        """Remove what is no longer needed, now that the newest is whole."""
        num_whole = 0
        steps = saved_steps(self.folder)
        before = self._held_before
        held = None if before is None else next((step for step in steps if step <= before), None)
        for step in steps:
            if step <= newest and num_whole < self._keep:
                num_whole += self._is_whole(step)  # a damaged one is kept until there are enough whole ones above it
            elif step not in (self._best, held):
                self._remove(step)

    def _is_whole(self, step: int) -> bool:
        if step not in self._whole:
            try:
                verify(self.folder / checkpoint_name(step))
            except DamagedCheckpoint:
                return False
            self._whole.add(step)
        return True

    def _remove(self, step: int) -> None:
        path = self.folder / checkpoint_name(step)
        doomed = path.with_name(path.name + STAGED)
        try:
            # In one move: a folder that is half gone must not look like a damaged checkpoint.
            path.rename(doomed)
            self._whole.discard(step)
            shutil.rmtree(doomed)
        except OSError as error:
            if step not in self._undeletable:
                self._undeletable.add(step)
                self._tell(f"the old checkpoint `{path.name}` could not be removed: {_reason(error)}")

    def _clean_up(self) -> None:
        """Remove what a process that was killed left half written, half replaced or half removed."""
        for entry in list(self.folder.iterdir()):
            name = entry.name.removesuffix(STAGED)
            replaced = entry.name.removeprefix(".").removesuffix(".old").removesuffix(".trash")
            try:
                if name != entry.name and checkpoint_step(name) is not None:
                    shutil.rmtree(entry)
                elif replaced != entry.name and checkpoint_step(replaced) is not None:
                    recover_publish(self.folder / replaced)
            except OSError as error:
                self._tell(f"`{entry.name}`, left by a run that was killed, could not be removed: {_reason(error)}")


def disk_space_warning(folder: Path, *, checkpoint_bytes: int, keep: int) -> str | None:
    """Say in one line if the checkpoints of a run will not all fit on the disk; None if they will."""
    at_once = max(keep, _LEAST_KEPT) + 3  # beside them the best, the one at the lowest loss, and the one being written
    needed, free = at_once * checkpoint_bytes, shutil.disk_usage(folder).free
    if needed <= free:
        return None
    return f"checkpoints will take about {size_bytes(needed)} ({count(at_once)} at once), {size_bytes(free)} are free"


def _reason(error: OSError | DamagedCheckpoint) -> str:
    if isinstance(error, DamagedCheckpoint):
        return error.what
    return "the disk is full" if is_disk_full(error) else error.strerror or type(error).__name__
