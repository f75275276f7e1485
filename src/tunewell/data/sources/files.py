"""Find the files a source names: a file, a folder, a glob, or a saved Hugging Face dataset."""

import glob as globbing
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunewell.core.errors import UserError

FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".txt": "txt",
    ".arrow": "arrow",
}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_SPLITS, _STATE = "dataset_dict.json", "state.json"
READABLE = "`.jsonl .json .csv .tsv .parquet .txt`, also with `.gz` or `.zst` behind"


@dataclass(frozen=True)
class SourceFile:
    """One file to read: where it lies, what it is called in the corpus, how to read it."""

    path: Path
    name: str
    """As written in ledgers and documents: relative to the config, never absolute."""
    format: str
    compression: str | None = None


def split_limit(path: str) -> tuple[str, int | None]:
    """Split `rows.jsonl#500` into the path and the limit; a `#` that is part of a real file name stays."""
    head, mark, tail = path.rpartition("#")
    if mark and tail.isdigit() and not Path(path).exists():
        return head, int(tail)
    return path, None


def find_files(path: str, *, base: Path) -> list[SourceFile]:
    """List the files behind one source in a stable order; raise UserError when there are none."""
    if "://" in path:
        raise UserError(
            f"`{path}` is not on this machine", fix="copy it here first; reading from remote storage is not there yet"
        )
    full = base / Path(path).expanduser()
    if full.is_file():
        files = [full]
    elif full.is_dir():
        files = _files_of(full)
        if not files:
            raise UserError(f"there is nothing to read in the folder `{path}`", fix=f"put files there: {READABLE}")
    elif globbing.has_magic(path):
        files = _matching(path, base)
        if not files:
            raise UserError(f"no file matches `{path}`", where=f"looked in `{base.resolve().name}`")
    else:
        raise UserError(f"there is no file or folder `{path}`", fix=_near_names(full))
    return [_source_file(file, base) for file in files]


def _matching(pattern: str, base: Path) -> list[Path]:
    """Expand a glob: files, and the saved datasets among the folders it matches."""
    pattern = str(Path(pattern).expanduser())
    # Not Path.glob, which refuses absolute patterns; not a joined pattern, since `base` may hold brackets of its own.
    found = [base / name for name in sorted(globbing.glob(pattern, root_dir=base, recursive=True))]  # noqa: PTH207
    saved = {folder: files for folder in found if folder.is_dir() and (files := _saved_dataset(folder)) is not None}
    inside = {file for folder in saved for file in folder.rglob("*")}
    return [
        file
        for path in found
        if path not in inside
        for file in (saved.get(path, []) if path.is_dir() else [path] if path.is_file() else [])
    ]


def _near_names(missing: Path) -> str:
    if not missing.parent.is_dir():
        return f"the folder `{missing.parent.name}` does not exist either; check the path"
    names = sorted(entry.name for entry in missing.parent.iterdir() if _kind(entry)[0])[:8]
    return f"files there: {', '.join(names)}" if names else f"give a path to your rows: {READABLE}"


def _kind(path: Path) -> tuple[str | None, str | None]:
    compression = COMPRESSIONS.get(path.suffix.lower())
    stem = path.with_suffix("") if compression else path
    return FORMATS.get(stem.suffix.lower()), compression


def _source_file(path: Path, base: Path) -> SourceFile:
    file_format, compression = _kind(path)
    if file_format is None:
        raise UserError(f"cannot tell what `{path.name}` is from its name", fix=f"rename it to one of {READABLE}")
    if compression and file_format in ("parquet", "arrow"):
        raise UserError(f"`{path.name}` is compressed twice", fix="decompress it: Parquet and Arrow compress inside")
    if not os.access(path, os.R_OK):
        raise UserError(f"`{path.name}` may not be read by you", fix="change its permissions")
    resolved, home = path.resolve(), base.resolve()
    name = resolved.relative_to(home).as_posix() if resolved.is_relative_to(home) else path.name
    return SourceFile(path, name, file_format, compression)


def _files_of(folder: Path) -> list[Path]:
    """List what can be read in a folder and the folders below it; a saved dataset among them counts as a whole."""
    saved = _saved_dataset(folder)
    if saved is not None:
        return saved
    files: list[Path] = []
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith("."):
            continue
        if entry.is_dir() and not entry.is_symlink():
            files += [] if _is_corpus(entry) else _files_of(entry)
        elif entry.is_file() and _kind(entry)[0]:
            files.append(entry)
    return files


def _is_corpus(folder: Path) -> bool:
    """Know what `prepare` itself wrote beside the rows, which must not become rows of the next run."""
    return all((folder / name).is_file() for name in ("manifest.json", "dropped.jsonl", _SPLITS))


def _saved_dataset(folder: Path) -> list[Path] | None:
    """List the files that `datasets.save_to_disk` wrote, in its own order; of several splits, those of `train`.

    None for any other folder.
    """
    if (folder / _SPLITS).is_file():
        splits = _read_listing(folder / _SPLITS, "splits")
        if "train" not in splits:
            raise UserError(
                f"the dataset in `{folder.name}` has no split called train",
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
            f"the dataset in `{folder.name}` lacks its file `{missing}`", fix="save it again with `save_to_disk`"
        )
    return [folder / name for name in names]


def _read_listing(path: Path, key: str) -> list[Any]:
    try:
        listing = json.loads(path.read_text(encoding="utf-8"))[key]
        if not isinstance(listing, list) or (key != "splits" and not all(isinstance(entry, dict) for entry in listing)):
            raise TypeError(f"`{key}` is no list")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"`{path.parent.name}` looks like a saved dataset, but its `{path.name}` cannot be read: {error}",
            fix="save it again with `save_to_disk`",
        ) from error
    return [str(entry) for entry in listing] if key == "splits" else listing
