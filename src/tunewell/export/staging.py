"""Where an export is made and how it gets its name: nothing of other people's is touched, nothing half made is left."""

import json
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from tunewell.core.errors import UserError
from tunewell.core.files import is_disk_full, sync_folder
from tunewell.core.lock import FolderLock
from tunewell.records.parity import FORMAT, PARITY, PROOF, REFERENCE, Parity, write_record

if TYPE_CHECKING:
    from tunewell.export.existing import ExistingExport

_LOCK = "tunewell-export.lock"
_BESIDE = (PARITY, PROOF, REFERENCE, "README.md")
_ENDINGS = ("SIGTERM", "SIGHUP")


@dataclass(frozen=True)
class Workshop:
    """A hidden folder on the disk of the export, which goes away with everything in it."""

    staged: Path
    """Where the export is made."""
    aside: Path
    """Where what is replaced waits until the new is in its place."""


@contextmanager
def open_staging(out: Path) -> Iterator[Workshop]:
    """Give a folder to work in, on the same disk as `out`; it is removed however the body ends, SIGTERM included.

    Raises UserError where nothing can be written, and where another process is exporting to the same place.
    """
    with _told_by_signals(), _told_of_the_disk(out):
        work = _work_folder(out)
        lock = None
        try:
            lock = FolderLock.take(work / _LOCK, doing=f"exporting to `{out}`")
            _clear_dead(out, work)
            made = Workshop(work / "export", work / "aside")
            made.staged.mkdir()
            made.aside.mkdir()
            yield made
        finally:
            if lock is not None:
                lock.release()
            shutil.rmtree(work, ignore_errors=True)


def publish(shop: Workshop, out: Path, standing: "ExistingExport | None") -> None:
    """Give an export its name: by one move where nothing is there, else file by file, the proof last.

    Whatever fails in between, all that was there is back in its place. Files that are no export's are never moved.
    """
    _readable(shop.staged)
    sync_folder(shop.staged)
    if not out.exists():
        shop.staged.rename(out)
        sync_folder(out.parent)
        return
    kept = {name for own in standing.kept for name in own.sha256s} if standing else set()
    names = [path.relative_to(shop.staged).as_posix() for path in sorted(shop.staged.rglob("*")) if path.is_file()]
    made = [name for name in names if name not in kept]
    old = [*_BESIDE, *(name for own in (standing.replaced if standing else ()) for name in own.sha256s)]
    for name in made:
        if name not in old and (out / name).exists():
            raise UserError(
                f"`{out / name}` is in the way and is none of this export's files",
                fix="move it away, or name another folder with `--out`",
            )
    done: list[tuple[Path, Path]] = []
    try:
        for name in old:
            if (out / name).exists():
                _move(out / name, shop.aside / name, done)
        for name in sorted(made, key=lambda name: (name == PARITY, name == PROOF, name)):
            _move(shop.staged / name, out / name, done)
    except BaseException:
        for source, target in reversed(done):
            target.rename(source)
        raise
    sync_folder(out)


def _move(source: Path, target: Path, done: list[tuple[Path, Path]]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    source.rename(target)
    done.append((source, target))


def _readable(staged: Path) -> None:
    """Give every file the rights that files of this person have: some libraries write for their owner alone."""
    mode = (staged / PROOF).stat().st_mode & 0o777
    for path in staged.rglob("*"):
        if path.is_file() and path.stat().st_nlink == 1:
            path.chmod(mode)


def _prefix(out: Path) -> str:
    return f".{out.name}.tunewell-"


def _clear_dead(out: Path, work: Path) -> None:
    """Remove what an export left that was killed; raise UserError where one is alive."""
    for parent in (out.parent, out):
        for other in sorted(parent.glob(f"{_prefix(out)}*")) if parent.is_dir() else []:
            if other != work and (other / _LOCK).is_file():
                FolderLock.take(other / _LOCK, doing=f"exporting to `{out}`").release()
                shutil.rmtree(other, ignore_errors=True)


def _work_folder(out: Path) -> Path:
    """Make a hidden folder beside the export, or in it where it is there: that may be a disk of its own."""
    parent = out if out.is_dir() else out.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(dir=parent, prefix=_prefix(out)))
    except OSError as error:
        raise UserError(
            f"`{out}` cannot be written", where=error.strerror or str(error), fix="name another folder with `--out`"
        ) from error


@contextmanager
def _told_of_the_disk(out: Path) -> Iterator[None]:
    """Say of a disk that fills up what it is: no bug."""
    try:
        yield
    except OSError as error:
        if not is_disk_full(error):
            raise
        raise UserError(
            f"the disk is full; `{out}` was not made", fix="free some room, or name another disk with `--out`"
        ) from error


@contextmanager
def _told_by_signals() -> Iterator[None]:
    """Let a request to end clean up first; only the main thread can hear one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.Signals[name] for name in _ENDINGS if hasattr(signal, name)]
    before = {number: signal.signal(number, _leave) for number in numbers if signal.getsignal(number) == signal.SIG_DFL}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    with suppress(ValueError):
        signal.signal(number, signal.SIG_IGN)  # one request is enough, and must not cut the cleaning short
    raise SystemExit(128 + number)


def copy_kept(standing: "ExistingExport", staged: Path) -> None:
    """Give what stays of an export a second name beside the new, or copy it: all of it is proven together."""
    for name in (name for own in standing.kept for name in own.sha256s):
        target = staged / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(standing.folder / name, target)
        except OSError:
            shutil.copyfile(standing.folder / name, target)


# The figures of an export that was not proven, beside where it would have been.


def keep_failed(out: Path, parity: Parity) -> Path:
    """Write why an export was not proven, over what an earlier one left there, and never over anything else."""
    number, path = 1, _path(out)
    while path.exists() and not _is_ours(path):
        number += 1
        path = out.with_name(f"{out.name}-failed-{number}.json")
    write_record(path, parity)
    return path


def forget_failed(out: Path) -> None:
    """Remove the figures of an earlier export, once a later one is proven."""
    if _is_ours(_path(out)):
        _path(out).unlink()


def _path(out: Path) -> Path:
    return out.with_name(f"{out.name}-failed.json")


def _is_ours(path: Path) -> bool:
    try:
        return json.loads(path.read_text(encoding="utf-8"))["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError):
        return False
