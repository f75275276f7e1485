"""Local files as a data source: a file, a folder, a glob, or a dataset written by `datasets.save_to_disk`."""

import glob as globbing
import itertools
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, BinaryIO, TypeVar

from tunewell.core.errors import UserError
from tunewell.core.files import HUB_ID, open_file, parse_json, read_text
from tunewell.core.units import count
from tunewell.data.rows.conversation import is_list, is_object
from tunewell.data.sources.base import READABLE, TABLE, SourceOptions, detect_format

P = TypeVar("P", bound=PurePath)

_SPLITS, _STATE = "dataset_dict.json", "state.json"
_NUM_SUGGESTED = 8
_MISTYPED = re.compile(r"(s3|r2|hf|https?|gs|az):?/{1,3}(?!/)", re.IGNORECASE)
"""The start of an address without its colon or a slash."""
_TEXTS = ("txt", "md")
_STORES = (".git/annex/objects", ".dvc/cache")
"""Folders of a repository where git-annex (DataLad) and DVC keep the files that its links lead to."""
_CONFIG = "tunewell.yaml"


@dataclass(frozen=True)
class LocalFile:
    """A file on this machine."""

    path: Path
    name: str

    @classmethod
    def find(cls, path: str, *, base: Path, options: SourceOptions | None = None) -> list["LocalFile"]:
        """Return the files of a path, folder or glob in a stable order; raise UserError if there are no files."""
        path = path.removeprefix("file://")
        listing = _Listing(path, base)
        full = listing.path
        if listing.is_file:
            return [cls._of(full, base)]
        if listing.is_folder or globbing.has_magic(path):
            if files := select_row_files(listing.inside):
                return [cls._of(file, base) for file in files]
            links = len(listing.files) - len(listing.inside)
            where = f"skipped {count(links, 'link')} to files outside of it; name the targets instead"
            if listing.is_folder:
                what, fix = f"the folder `{path}` contains no readable file", f"put files there: {READABLE}"
                raise UserError(what, where=where if links else None, fix=fix)
            raise UserError(
                f"no file matches `{path}`", where=where if links else f"searched in `{base.resolve().name}`"
            )
        if full.exists():
            raise UserError(f"`{path}` is neither a file nor a folder", fix="copy its content to a file, and name that")
        likely = _MISTYPED.match(path)
        fix = f"did you mean `{likely[1]}://{path[likely.end() :]}`?" if likely else _suggest_names(full)
        where = f"a data set of the hub has the address `hf://datasets/{path}`" if HUB_ID.fullmatch(path) else None
        raise UserError(f"there is no file or folder `{path}`", where=where, fix=fix)

    @classmethod
    def _of(cls, path: Path, base: Path) -> "LocalFile":
        if not os.access(path, os.R_OK):
            raise UserError(f"no permission to read `{path.name}`", fix="change its permissions")
        # The name of a link, not of its target: in the cache of the hub the targets are hashes.
        resolved, home = path.parent.resolve() / path.name, base.resolve()
        return cls(path, resolved.relative_to(home).as_posix() if resolved.is_relative_to(home) else path.name)

    def open(self) -> BinaryIO:
        """Open the file for reading."""
        return open_file(self.path)

    def size(self) -> int:
        """Return the size in bytes."""
        return self.path.stat().st_size

    def stamp(self) -> str:
        """Return the size and the time of the last modification."""
        stat = self.path.stat()
        return f"{stat.st_size} {stat.st_mtime_ns}"


def unread_files(path: str, *, base: Path) -> list[str]:
    """Return the names of the files of a folder or glob that `LocalFile.find` leaves out.

    Hidden files and the config do not count.
    """
    listing = _Listing(path, base, is_readable=False)
    if listing.is_file or (listing.is_folder and _saved_dataset(listing.path) is not None):
        return []
    known = {*select_row_files([file for file in listing.files if detect_format(file.name)[0]]), listing.path / _CONFIG}
    return listing.names(file for file in listing.inside if file not in known)


def outside_links(path: str, *, base: Path) -> list[str]:
    """Return the names of links to files outside of a folder or glob. `LocalFile.find` leaves them out."""
    listing = _Listing(path, base)
    return [] if listing.is_file else listing.names(file for file in listing.files if file not in listing.inside)


class _Listing:
    """The files of a folder or glob."""

    def __init__(self, path: str, base: Path, *, is_readable: bool = True) -> None:
        path = path.removeprefix("file://")
        self.path = base / Path(path).expanduser()
        self.is_file, self.is_folder = self.path.is_file(), self.path.is_dir()
        root, self.files = self.path, list[Path]()
        if self.is_folder:
            self.files = _files_in(self.path, is_readable=is_readable)
        elif not self.is_file:
            parts = itertools.takewhile(lambda part: not globbing.has_magic(part), Path(path).expanduser().parts)
            root, self.files = base.joinpath(*parts), _files_matching(path, base)
        self.inside = _inside(root, self.files)
        """The files without links to targets outside of the folder."""

    def names(self, files: Iterable[Path]) -> list[str]:
        return [file.relative_to(self.path).as_posix() if self.is_folder else file.name for file in files]


def _inside(root: Path, files: list[Path]) -> list[Path]:
    """Return the files without links to targets outside of a folder, which could expose other files of the reader."""
    home = root.resolve()
    # In the cache of the hub, the files of a snapshot are links: models--x/snapshots/1/a.json -> models--x/blobs/2.
    folders = [home, *(parent.parent / "blobs" for parent in (home, *home.parents) if parent.name == "snapshots")]
    # So are the files of a repository with git-annex or DVC: repository/data/a.json -> repository/.git/annex/objects/2.
    folders += [parent / store for parent in (home, *home.parents) for store in _STORES if (parent / store).is_dir()]
    return [file for file in files if any(map(file.resolve().is_relative_to, folders))]


def select_row_files(files: list[P]) -> list[P]:
    """Leave out files that describe the others: `manifest.json`, and `.md` files and `LICENSE.txt` beside row files."""
    formats = {file: detect_format(file.name)[0] for file in files}
    rows = [
        file
        for file in files
        if formats[file] not in _TEXTS and (formats[file] != "json" or file.stem.lower() not in TABLE["descriptions"])
    ]
    texts = [file for file in files if formats[file] in _TEXTS]
    if rows:
        texts = [file for file in texts if formats[file] == "txt" and file.stem.lower() not in TABLE["notices"]]
    # Without rows and texts, a description is what the user wants to train on.
    return [file for file in files if file in {*rows, *texts}] or files


def _files_in(folder: Path, *, is_readable: bool = True) -> list[Path]:
    """Return the files below a folder, by default those with a known format. A saved dataset is treated as a whole."""
    saved = _saved_dataset(folder)
    if saved is not None:
        return saved
    files: list[Path] = []
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith("."):
            continue
        if entry.is_dir() and not entry.is_symlink():
            files += [] if _is_output(entry) else _files_in(entry, is_readable=is_readable)
        elif entry.is_file() and (detect_format(entry.name)[0] or not is_readable):
            files.append(entry)
    return files


def _files_matching(pattern: str, base: Path) -> list[Path]:
    """Expand a glob to files. A matching folder is used only if it is a saved dataset."""
    pattern = str(Path(pattern).expanduser())
    # Path.glob rejects absolute patterns; joining base and pattern fails if the name of base contains brackets.
    found = [base / name for name in sorted(globbing.glob(pattern, root_dir=base, recursive=True))]  # noqa: PTH207
    saved = {folder: files for folder in found if folder.is_dir() and (files := _saved_dataset(folder)) is not None}
    inside = {file for folder in saved for file in folder.rglob("*")}
    return [
        file
        for path in found
        if path not in inside
        for file in (saved.get(path, []) if path.is_dir() else [path] if path.is_file() else [])
    ]


def _suggest_names(missing: Path) -> str:
    if not missing.parent.is_dir():
        return f"the folder `{missing.parent.name}` does not exist either; check the path"
    names = sorted(entry.name for entry in missing.parent.iterdir() if detect_format(entry.name)[0])[:_NUM_SUGGESTED]
    return f"files there: {', '.join(names)}" if names else f"give a path to your rows: {READABLE}"


def _is_output(folder: Path) -> bool:
    """Return True for a corpus, a run or an export. Their files must not become rows of the next run."""
    return any(all((folder / name).is_file() for name in names) for names in TABLE["outputs"])


def _saved_dataset(folder: Path) -> list[Path] | None:
    """Return the files of the split `train` in a saved dataset, in its order, or None if it is another folder."""
    if (folder / _SPLITS).is_file():
        splits = [str(split) for split in _read_listing(folder / _SPLITS, "splits")]
        if "train" not in splits:
            raise UserError(
                f"the dataset in `{folder.name}` has no split named `train`",
                where=f"its splits: {', '.join(splits) or 'none'}",
                fix=f"name one of them, for example `{folder.name}/{splits[0]}`" if splits else None,
            )
        folder = folder / "train"
    elif not (folder / _STATE).is_file():
        return None
    names = [entry.get("filename") for entry in _read_listing(folder / _STATE, "_data_files")]
    missing = next((name for name in names if Path(str(name)).name != name or not (folder / name).is_file()), None)
    if missing is not None:
        raise UserError(
            f"`{folder.name}` is a saved dataset whose file `{missing}` is missing",
            fix="save it again with `save_to_disk`",
        )
    return [folder / name for name in names]


def _read_listing(path: Path, key: str) -> list[Any]:
    try:
        listing: object = parse_json(read_text(path))[key]
        if not is_list(listing) or (key != "splits" and not all(is_object(entry) for entry in listing)):
            raise TypeError(f"`{key}` is not a list")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"`{path.parent.name}` looks like a saved dataset, but its `{path.name}` cannot be read: {error}",
            fix="save it again with `save_to_disk`",
        ) from error
    return listing
