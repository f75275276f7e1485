"""Write an export in a hidden staging folder and publish it whole: other files stay, no partial export is left."""

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
_SHARED_FILES = (PARITY, PROOF, REFERENCE, "README.md")
"""Files of an export that belong to no artefact."""
_SIGNALS = ("SIGTERM", "SIGHUP")


@dataclass(frozen=True)
class Staging:
    """Folders on the same disk as the export; they are removed at the end."""

    folder: Path
    """The new export."""
    replaced: Path
    """Old files, until all new ones have their final names."""


@contextmanager
def open_staging(out: Path) -> Iterator[Staging]:
    """Yield a staging folder on the same disk as `out`; remove it at the end, on SIGTERM too.

    Raises UserError if nothing can be written there, or if another process is exporting to the same folder.
    """
    with _exit_on_signals(), _report_full_disk(out):
        hidden = _make_hidden_folder(out)
        lock = None
        try:
            lock = FolderLock.take(hidden / _LOCK, doing=f"exporting to `{out}`")
            _remove_abandoned(out, hidden)
            staging = Staging(hidden / "export", hidden / "replaced")
            staging.folder.mkdir()
            staging.replaced.mkdir()
            yield staging
        finally:
            if lock is not None:
                lock.release()
            shutil.rmtree(hidden, ignore_errors=True)


def publish(staging: Staging, out: Path, existing: "ExistingExport | None") -> None:
    """Move a finished export to its final folder: with one rename if there is none, else file by file, proof last.

    If a move fails, all moves are undone. Files that do not belong to an export are never moved.
    """
    _set_permissions(staging.folder)
    sync_folder(staging.folder)
    if not out.exists():
        staging.folder.rename(out)
        sync_folder(out.parent)
        return
    kept = {name for artefact in existing.kept for name in artefact.sha256s} if existing else set()
    files = sorted(path for path in staging.folder.rglob("*") if path.is_file())
    names = [path.relative_to(staging.folder).as_posix() for path in files]
    new = [name for name in names if name not in kept]
    replaced = existing.replaced if existing else []
    old = [*_SHARED_FILES, *(name for artefact in replaced for name in artefact.sha256s)]
    for name in new:
        if name not in old and (out / name).exists():
            raise UserError(
                f"`{out / name}` is in the way: it does not belong to this export",
                fix="move it, or choose another folder with `--out`",
            )
    moves: list[tuple[Path, Path]] = []
    try:
        for name in old:
            if (out / name).exists():
                _move(out / name, staging.replaced / name, moves)
        for name in sorted(new, key=lambda name: (name == PARITY, name == PROOF, name)):
            _move(staging.folder / name, out / name, moves)
    except BaseException:
        for source, target in reversed(moves):
            target.rename(source)
        raise
    sync_folder(out)


def copy_kept(existing: "ExistingExport", folder: Path) -> None:
    """Link, or copy, the kept artefacts into the staging folder: they are proven together with the new ones."""
    for name in (name for artefact in existing.kept for name in artefact.sha256s):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(existing.folder / name, target)
        except OSError:
            shutil.copyfile(existing.folder / name, target)


def write_failed_parity(out: Path, parity: Parity) -> Path:
    """Write the parity of an export that was not proven beside `out`; overwrite only a file of an earlier failure."""
    number, path = 1, _failed_path(out)
    while path.exists() and not _is_parity(path):
        number += 1
        path = out.with_name(f"{out.name}-failed-{number}.json")
    write_record(path, parity)
    return path


def remove_failed_parity(out: Path) -> None:
    """Remove the file of an earlier failure once an export is proven."""
    if _is_parity(_failed_path(out)):
        _failed_path(out).unlink()


def _failed_path(out: Path) -> Path:
    return out.with_name(f"{out.name}-failed.json")


def _is_parity(path: Path) -> bool:
    try:
        return json.loads(path.read_text(encoding="utf-8"))["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _move(source: Path, target: Path, moves: list[tuple[Path, Path]]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    source.rename(target)
    moves.append((source, target))


def _set_permissions(folder: Path) -> None:
    """Give every file the user's default permissions: some libraries write files that only the owner can read."""
    mode = (folder / PROOF).stat().st_mode & 0o777
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_nlink == 1:
            path.chmod(mode)


def _hidden_prefix(out: Path) -> str:
    return f".{out.name}.tunewell-"


def _make_hidden_folder(out: Path) -> Path:
    """Make a hidden folder beside the export, or inside it if it exists: it may be a mount point."""
    parent = out if out.is_dir() else out.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(dir=parent, prefix=_hidden_prefix(out)))
    except OSError as error:
        raise UserError(
            f"`{out}` cannot be written", where=error.strerror or str(error), fix="choose another folder with `--out`"
        ) from error


def _remove_abandoned(out: Path, hidden: Path) -> None:
    """Remove staging folders of killed exports; raise UserError if one is still running."""
    for parent in (out.parent, out):
        for other in sorted(parent.glob(f"{_hidden_prefix(out)}*")) if parent.is_dir() else []:
            if other != hidden and (other / _LOCK).is_file():
                FolderLock.take(other / _LOCK, doing=f"exporting to `{out}`").release()
                shutil.rmtree(other, ignore_errors=True)


@contextmanager
def _report_full_disk(out: Path) -> Iterator[None]:
    """Turn the OSError of a full disk into a UserError."""
    try:
        yield
    except OSError as error:
        if not is_disk_full(error):
            raise
        raise UserError(
            f"the disk is full; `{out}` was not written", fix="free some space, or choose another disk with `--out`"
        ) from error


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Exit through the `finally` blocks on SIGTERM and SIGHUP. Only the main thread receives signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.Signals[name] for name in _SIGNALS if hasattr(signal, name)]
    before = {number: signal.signal(number, _exit) for number in numbers if signal.getsignal(number) == signal.SIG_DFL}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    with suppress(ValueError):
        signal.signal(number, signal.SIG_IGN)  # a second signal must not interrupt the cleanup
    raise SystemExit(128 + number)
