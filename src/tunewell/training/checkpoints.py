"""Write checkpoints in the background, crash-safe (atomic), and remove old ones.

    step-000123.tmp/  write, flush and read back files -> write manifest.json with all hashes -> rename: step-000123/

Training waits only while the state is copied. Files are written from that copy and hashed in parallel. Old checkpoints
are removed only after the new one is complete.
"""

import hashlib
import json
import math
import platform
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from tunewell.core.errors import UserError
from tunewell.core.files import is_disk_full, open_file, publish_folder, recover_publish, sync_folder, write_synced
from tunewell.core.redact import redact
from tunewell.core.units import count, size_bytes
from tunewell.core.version import made_by
from tunewell.records.checkpoint import (
    STAGED,
    CheckpointManifest,
    DamagedCheckpoint,
    FileRecord,
    checkpoint_name,
    checkpoint_step,
    damaged,
    is_inside,
    read_file,
    read_manifest,
    saved_steps,
    verify,
    write_manifest,
)
from tunewell.records.events import plain, with_numbers
from tunewell.training.find_checkpoints import Saved, find_best, find_newest, newest_best_step
from tunewell.training.memory import PinnedMemory

_THREADS = 4
_READ_BYTES = 1 << 20
_LARGE_BYTES = 1 << 30
_MIN_KEPT = 2
_TRIES = 3
_WAIT_SECONDS = 0.1
_SMALL_BYTES = 64 << 10


@dataclass
class State:
    """The state that a run needs to resume. Secrets are removed when it is written."""

    step: int
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """File name ending in `.safetensors` (may contain `/`) -> tensor name -> tensor."""
    texts: dict[str, str] = field(default_factory=dict)
    """File name -> text of other files, for example `adapter_config.json`."""
    progress: dict[str, Any] = field(default_factory=dict)
    """JSON values: step, best loss and its step, evaluations since then, left-out documents, loss scale."""
    identity: dict[str, Any] = field(default_factory=dict)


class Snapshot(State):
    """A copy of a state that later training steps do not change. GPU copies are complete after `not_finite`."""

    def __init__(self, state: State, pinned: PinnedMemory) -> None:
        for name in (*state.tensors, *state.texts):
            if not is_inside(name) or name.endswith(".safetensors") != (name in state.tensors):
                raise ValueError(f"{name!r} is not a valid name for a file in a checkpoint")
        devices = {tensor.device for tensors in state.tensors.values() for tensor in tensors.values()}
        # Convert to JSON now, so that an invalid value fails here and not in the writer thread.
        progress, identity = (json.loads(json.dumps(plain(own))) for own in (state.progress, state.identity))
        self.num_bytes = sum(tensor.nbytes for tensors in state.tensors.values() for tensor in tensors.values())
        pinned.reset()
        tensors = {
            file: {name: _host_copy(tensor, pinned) for name, tensor in own.items()}
            for file, own in state.tensors.items()
        }
        super().__init__(state.step, tensors, dict(state.texts), progress, identity)
        self._largest = {
            file: _host_copy(_largest(tensors.values()), pinned) for file, tensors in state.tensors.items()
        }
        self._arrivals = [
            torch.cuda.current_stream(device).record_event() for device in devices if device.type == "cuda"
        ]

    def not_finite(self) -> str | None:
        """Wait for the copies. Return the name of a tensor with NaN or infinity, or None if all are finite."""
        for arrival in self._arrivals:
            arrival.synchronize()
        for file, largest in self._largest.items():
            if not math.isfinite(largest.item()):
                names = [name for name, tensor in self.tensors[file].items() if not _is_finite(tensor)]
                return f"`{names[0]}` in `{file}`" if names else f"`{file}`"
        return None


def _host_copy(tensor: Tensor, pinned: PinnedMemory) -> Tensor:
    source = tensor.detach()
    if source.device.type != "cuda":
        return source.to("cpu", copy=True, memory_format=torch.contiguous_format)
    # Later steps change the original only after this copy, because both are in the same CUDA stream.
    return pinned.empty_like(source).copy_(source, non_blocking=True)


def safetensors_parts(tensors: dict[str, Tensor]) -> list[bytes | memoryview]:
    """Return the content of a safetensors file: the header, and the memory of each tensor. Only small ones are copied.

    The bytes are those of `safetensors.torch.save`, which chooses the order and the names of the dtypes.
    """
    empty = safetensors.torch.save({name: tensor.new_empty(0) for name, tensor in tensors.items()})
    header, at = json.loads(empty[8:]), 0
    for name, entry in header.items():
        entry |= {"shape": list(tensors[name].shape), "data_offsets": [at, at + tensors[name].nbytes]}
        at += tensors[name].nbytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    bodies = (tensors[name].contiguous().view(-1).view(torch.uint8).numpy().data for name in header)
    groups = groupby([len(text).to_bytes(8, "little") + text, *bodies], key=lambda part: len(part) < _SMALL_BYTES)
    return [part for is_small, group in groups for part in ([b"".join(group)] if is_small else group)]


def _largest(tensors: Iterable[Tensor]) -> Tensor:
    """Return the largest magnitude of all tensors, on the device. It is NaN or infinite if any value is."""
    # `aminmax` is as fast as a sum and six times as fast as a norm (48 matrices of 4 MiB, one CPU thread).
    extremes = [
        torch.stack(torch.aminmax(tensor.detach())).abs().float()
        for tensor in tensors
        if tensor.is_floating_point() and tensor.numel()
    ]
    return torch.cat([pair.to(extremes[0].device) for pair in extremes]).max() if extremes else torch.zeros(())


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def write_checkpoint(folder: Path, snapshot: Snapshot, *, best_step: int | None) -> list[str]:
    """Write and flush every file, the manifest last. Each file is read back and compared with what was written.

    Returns the names of the text files from which secrets were removed. Raises OSError if a write fails, and
    DamagedCheckpoint if the files do not contain the bytes that were written.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    texts = {name: redact(text) for name, text in snapshot.texts.items()}
    contents: dict[str, list[bytes | memoryview]] = {
        **{name: safetensors_parts(tensors) for name, tensors in snapshot.tensors.items()},
        **{name: [text.encode("utf-8", "surrogatepass")] for name, text in texts.items()},
    }
    inner = sorted({(folder / name).parent for name in contents} - {folder})
    for path in inner:
        path.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(_THREADS) as writers, ThreadPoolExecutor(_THREADS) as readers:
        writing = {name: writers.submit(_write, folder, name, parts, readers) for name, parts in contents.items()}
        wait(writing.values())
        files = {name: done.result() for name, done in writing.items()}
    for path in inner:
        sync_folder(path)
    manifest = CheckpointManifest(
        made_by=made_by(),
        step=snapshot.step,
        best_step=best_step,
        files=files,
        identity=snapshot.identity,
        progress=snapshot.progress,
        versions={
            "python": platform.python_version(),
            "torch": version("torch"),
            "safetensors": version("safetensors"),
        },
    )
    write_manifest(folder, manifest)
    read_manifest(folder)
    return [name for name, text in texts.items() if text != snapshot.texts[name]]


def _write(folder: Path, name: str, parts: list[bytes | memoryview], readers: Executor) -> FileRecord:
    """Write and flush a file while `readers` hash its content, then read it back and compare it with the content."""
    hashing = readers.submit(_sha256, parts)
    write_synced(folder / name, *parts)
    *starts, num_bytes = accumulate(map(len, parts), initial=0)
    is_equal = all(readers.map(partial(_is_equal, folder / name), starts, parts))
    if not is_equal or (folder / name).stat().st_size != num_bytes:
        raise damaged(folder, name, "does not contain the bytes that were written")
    return FileRecord(bytes=num_bytes, sha256=hashing.result())


def _sha256(parts: list[bytes | memoryview]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _is_equal(path: Path, start: int, part: bytes | memoryview) -> bool:
    """Return whether a file contains this part at its offset. numpy compares without holding the GIL."""
    expected, buffer = np.frombuffer(part, np.uint8), np.empty(_READ_BYTES, np.uint8)
    with open_file(path, buffering=0) as file:
        file.seek(start)
        return all(
            np.array_equal(buffer[: file.readinto(buffer.data[: len(block)])], block)
            for block in (expected[at : at + _READ_BYTES] for at in range(0, len(part), _READ_BYTES))
        )


class Checkpoints:
    """The checkpoints of one run, written by the process that owns the run folder.

    `on_trouble` is called with one line per problem, not per attempt, possibly from the writer thread. Other
    processes read checkpoints with `find_newest`, `find_best` and `load_state`.
    """

    def __init__(self, folder: Path, *, keep: int, on_trouble: Callable[[str], None]) -> None:
        self.folder = folder
        self.trouble: str | None = None
        """Why the last save failed; None if it succeeded."""
        self._keep = max(keep, _MIN_KEPT)
        self._report = on_trouble
        self._num_missed = 0
        self._whole: set[int] = set()
        self._pinned = PinnedMemory()
        self.held_before = 0
        """The newest checkpoint at or before this step is kept, for a run that rewinds because its loss diverges."""
        self._reported: set[str] = set()
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoints")
        self._pending: Future[None] | None = None
        self._is_large = False
        self.write_seconds = 0.0
        """Time that writing the last large checkpoint took, with its copy; 0 for small ones."""
        folder.mkdir(exist_ok=True)
        self._clean_up()
        self._best = newest_best_step(folder)

    def save(self, state: State, *, is_best: bool = False, wait: bool = False) -> None:
        """Copy the state now and write it in the background, after waiting for the previous save.

        A failed save (full disk, missing folder, non-finite tensor) is reported, and the run continues with the
        previous checkpoint.
        """
        self.wait()
        snapshot = Snapshot(state, self._pinned)
        self._is_large = snapshot.num_bytes > _LARGE_BYTES
        self._pending = self._writer.submit(self._save, snapshot, is_best)
        if wait:
            self.wait()

    @property
    def is_writing(self) -> bool:
        """Whether a large checkpoint is being written, so that the next save would wait for it."""
        return self._is_large and self._pending is not None and not self._pending.done()

    def wait(self) -> None:
        """Wait until the pending save is on disk or has failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait for the pending save, and end the writer thread."""
        self.wait()
        self._writer.shutdown()

    def newest(self) -> Saved | None:
        """Return the newest undamaged checkpoint, or None without checkpoints. Raise UserError if all are damaged."""
        self.wait()
        return find_newest(self.folder, on_trouble=self._report, unread=self._was_verified)

    def best(self) -> Saved | None:
        """Return the best checkpoint, or None if it is damaged or checkpoints were not compared."""
        self.wait()
        return find_best(self.folder, on_trouble=self._report, unread=self._was_verified)

    def load(self, saved: Saved, *, needs: Iterable[str] = ()) -> State:
        """Load a checkpoint to continue from. Raise UserError if a file in `needs` is missing."""
        self.wait()
        state = load_state(saved, needs=needs)
        self._best = saved.manifest.best_step
        return state

    def remove_after(self, step: int) -> None:
        """Remove the checkpoints after a step, because the run was rewound to that step."""
        self.wait()
        for later in saved_steps(self.folder):
            if later > step:
                self._remove(later)
        self._best = newest_best_step(self.folder)

    def _save(self, snapshot: Snapshot, is_best: bool) -> None:
        started = time.monotonic()
        name = checkpoint_name(snapshot.step)
        if spoiled := snapshot.not_finite():
            self._miss(f"{spoiled} is not finite", name)
            return
        # A run of an older version chose among its checkpoints on held-out rows; a resumed one forgets that choice.
        is_known = snapshot.progress.get("best_step", 0) is not None
        best = snapshot.step if is_best else self._best if is_known else None
        staged = self.folder / (name + STAGED)
        for attempt in range(1, _TRIES + 1):
            try:
                if not self.folder.is_dir():
                    self.folder.mkdir()
                    self._report(
                        f"the folder `{self.folder.name}` was missing, with all checkpoints; it was created again"
                    )
                for file in write_checkpoint(staged, snapshot, best_step=best):
                    self._report_once(f"a secret was removed from `{file}` in the checkpoints")
                publish_folder(staged, self.folder / name)
                break
            except (OSError, DamagedCheckpoint) as error:
                shutil.rmtree(staged, ignore_errors=True)
                is_final = isinstance(error, OSError) and is_disk_full(error)
                if is_final or attempt == _TRIES:
                    self._miss(_reason(error), name)
                    return
                time.sleep(_WAIT_SECONDS * attempt)
        if self._num_missed:
            self._report(
                f"checkpoints are saved again, starting with `{name}`; {count(self._num_missed)} could not be saved"
            )
        self.trouble, self._num_missed, self._best = None, 0, best
        self._whole.add(snapshot.step)
        self._rotate(snapshot.step)
        self.write_seconds = time.monotonic() - started if self._is_large else 0.0

    def _report_once(self, message: str) -> None:
        if message not in self._reported:
            self._reported.add(message)
            self._report(message)

    def _miss(self, reason: str, name: str) -> None:
        is_new = self.trouble != reason
        self.trouble = reason
        self._num_missed += 1
        if is_new:
            self._report(f"checkpoint `{name}` was not saved: {reason}; training continues with the previous one")

    def _rotate(self, newest: int) -> None:
        """Remove old checkpoints once the newest is complete."""
        num_whole = 0
        steps = saved_steps(self.folder)
        held = next((step for step in steps if step <= self.held_before), None)
        for step in steps:
            if step <= newest and num_whole < self._keep:
                num_whole += self._is_whole(step)  # damaged ones do not count towards `keep`
            elif step not in (self._best, held):
                self._remove(step)

    def _was_verified(self, step: int, file: str) -> bool:
        """Return whether this process has written or read the file before, so that it need not hash it again."""
        return step in self._whole

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
        trash = path.with_name(path.name + STAGED)
        try:
            # Rename first, so that a partly deleted folder is not mistaken for a damaged checkpoint.
            path.rename(trash)
            self._whole.discard(step)
            shutil.rmtree(trash)
        except OSError as error:
            self._report_once(f"the old checkpoint `{path.name}` could not be removed: {_reason(error)}")

    def _clean_up(self) -> None:
        """Clean up after a killed process: checkpoints that were only partly written, replaced or removed."""
        for entry in list(self.folder.iterdir()):
            name = entry.name.removesuffix(STAGED)
            replaced = entry.name.removeprefix(".").removesuffix(".old").removesuffix(".trash")
            try:
                if name != entry.name and checkpoint_step(name) is not None:
                    shutil.rmtree(entry)
                elif replaced != entry.name and checkpoint_step(replaced) is not None:
                    recover_publish(self.folder / replaced)
            except OSError as error:
                self._report(f"`{entry.name}`, left by a killed run, could not be removed: {_reason(error)}")


def checkpoints_at_once(keep: int) -> int:
    """Return the largest number of checkpoints on disk: also the best, the lowest loss, and the one being written."""
    return max(keep, _MIN_KEPT) + 3


def disk_space_warning(folder: Path, *, checkpoint_bytes: int, keep: int) -> str | None:
    """Return a warning if the checkpoints of a run will not fit on the disk, or None if they will."""
    num_at_once = checkpoints_at_once(keep)
    needed, free = num_at_once * checkpoint_bytes, shutil.disk_usage(folder).free
    if needed <= free:
        return None
    return (
        f"disk space: checkpoints need about {size_bytes(needed)} ({count(num_at_once)} at once), "
        f"{size_bytes(free)} are free"
    )


def _reason(error: OSError | DamagedCheckpoint) -> str:
    if isinstance(error, DamagedCheckpoint):
        return error.what
    return "the disk is full" if is_disk_full(error) else error.strerror or type(error).__name__


# Load a checkpoint, and compare its settings with those of a run.

_MAX_LINES = 5
_VALUE_CHARS = 60


def load_state(saved: Saved, *, needs: Iterable[str] = ()) -> State:
    """Load a checkpoint. Raise UserError if a file in `needs` is missing, DamagedCheckpoint if a file has changed."""
    files = saved.manifest.files
    if missing := sorted(set(needs) - set(files)):
        raise UserError(
            f"checkpoint `{saved.path.name}` has no " + " and no ".join(f"`{name}`" for name in missing),
            where=str(saved.path),
            fix="resuming without this file would change the result; start a new run with `--out NEW_FOLDER`",
        )
    state = State(saved.step, progress=with_numbers(saved.manifest.progress), identity=saved.manifest.identity)
    for name, record in files.items():
        data = read_file(saved.path, name, record)
        if name.endswith(".safetensors"):
            state.tensors[name] = safetensors.torch.load(data)
        else:
            state.texts[name] = data.decode("utf-8", "surrogatepass")
    return state


def compare_identity(saved: dict[str, Any], now: dict[str, Any], allowed: set[str]) -> list[str]:
    """Return the settings changed since a checkpoint, one line each. Raise UserError if a change is not allowed."""
    before, after = plain(saved), plain(now)
    lines = {
        name: f"{name}: {_show(before, name)} in the checkpoint, {_show(after, name)} now"
        for name in before | after
        if name not in before or name not in after or before[name] != after[name]
    }
    if refused := [name for name in lines if name not in allowed]:
        shown = [f"  {lines[name]}" for name in refused[:_MAX_LINES]]
        if len(refused) > _MAX_LINES:
            shown.append(f"  and {count(len(refused) - _MAX_LINES)} more")
        raise UserError(
            "\n".join(["the settings differ from those of the checkpoint:", *shown]),
            fix="undo the change, or allow it: " + " ".join(f"`--allow-change {name}`" for name in refused),
        )
    return list(lines.values())


def _show(settings: dict[str, Any], name: str) -> str:
    text = str(settings[name]) if name in settings else "not set"
    return text if len(text) <= _VALUE_CHARS else f"{text[:12]}..."  # the beginning of a hash is enough
