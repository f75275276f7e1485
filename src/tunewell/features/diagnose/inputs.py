"""Open what the user names: logs, run folders, notebooks, configs, state files, event files, folders of rank logs.

Files are recognised by their first bytes and their name. Archives are refused, pickles are named and never loaded, and
other binary files are skipped. A folder is searched three levels deep, and at most 200 of its files are read.
"""

import io
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from tunewell.core.errors import UserError
from tunewell.core.files import SYSTEM_FOLDERS, open_file, parse_json
from tunewell.core.units import count, size_bytes
from tunewell.features.diagnose.notebook import notebook_text
from tunewell.features.diagnose.reading import EVENTS, SMALL_BYTES, Reading, read_document
from tunewell.features.diagnose.tensorboard import event_lines
from tunewell.features.diagnose.text import read_chunks, utf16_of
from tunewell.records.healing import HEALING
from tunewell.runs.state import StoredRun

_MAX_FILES, _MAX_DEPTH, _MAX_SEEN = 200, 3, 20_000
_MAX_JSON = 64 << 20
_HEAD = 4096
_ARCHIVES = {
    b"PK\x03\x04": "a ZIP archive",
    b"\x1f\x8b": "a gzip file",
    b"BZh": "a bzip2 file",
    b"\xfd7zXZ": "an xz file",
    b"7z\xbc\xaf": "a 7-Zip archive",
    b"\x28\xb5\x2f\xfd": "a zstd file",
    b"Rar!": "a RAR archive",
}
_PICKLES = (".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt", ".joblib")
_SKIPPED_NAMES = ("tokenizer.json", "vocab.json", "merges.txt", "requirements.txt", "README.md", "chat_template.jinja")
_LOGS = (".log", ".txt", ".out", ".err", ".stdout", ".stderr", ".jsonl", ".json", ".csv", ".ipynb", ".yaml", ".yml", "")


def open_documents(paths: Sequence[Path], notes: list[str]) -> Iterator[Reading]:
    """Yield the reading of every document, and add a note for each file that is left out.

    Raises UserError if a path does not exist, or if nothing can be read.
    """
    num_read = 0
    refused: list[str] = []
    for path in paths:
        if not path.exists():
            raise UserError(f"there is no file or folder `{path}`", fix="give a log, a run folder, a config or `-`")
        # `<(command)` and `/dev/stdin`. A named pipe in a folder may have no writer, and reading it would never end.
        if path.is_fifo() and str(path.absolute()).startswith(SYSTEM_FOLDERS):
            with path.open("rb") as file:
                yield read_stream(file, name=path.name)
            num_read += 1
            continue
        for file, name in _files(path, notes):
            for reading in _readings(file, name, refused, notes):
                num_read += 1
                yield reading
    notes += refused
    if not num_read:
        reason = refused[0] if refused else f"`{paths[0]}` has no log, state file, notebook or config"
        raise UserError(reason, fix="give the text of the log; `tunewell diagnose -` reads it from stdin")


def read_stream(file: BinaryIO, *, name: str | None = None) -> Reading:
    """Read a text of any size from a stream, such as stdin. A short one may be a notebook, a state file or a config."""
    head = file.read(SMALL_BYTES)
    if len(head) < SMALL_BYTES:
        return _read_bytes(head, name)
    return read_document(read_chunks(file, head=head), name=name)


def _readings(file: Path, name: str, refused: list[str], notes: list[str]) -> Iterator[Reading]:
    """Yield the readings of a file, or of a run folder of tunewell."""
    if file.is_dir():
        from tunewell.features.diagnose.own_runs import read_own_run

        yield from read_own_run(file, notes)
        if (crash := StoredRun(file).crash) is None:
            return
        file, name = crash, crash.name
    if (reading := _read(file, name, refused)) is not None:
        yield reading


def _is_own_run(folder: Path) -> bool:
    """Return whether a folder holds a run of `tunewell train` or the log of `HealthCallback`."""
    has_events, *others = ((folder / name).is_file() for name in (EVENTS, "plan.json", HEALING))
    return has_events and any(others)


def _files(path: Path, notes: list[str]) -> Iterator[tuple[Path, str]]:
    """Yield the files to read with their names. A run folder of tunewell is yielded itself."""
    if path.is_file():
        yield path, path.name
        return
    found: list[Path] = []
    runs: list[Path] = []
    num_seen = 0
    for folder, folders, names in os.walk(path):
        depth = len(Path(folder).relative_to(path).parts)
        if _is_own_run(Path(folder)):
            runs.append(Path(folder))
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith(".")) if depth < _MAX_DEPTH else []
        for name in sorted(names):
            num_seen += 1
            file = Path(folder) / name
            is_events = name.startswith("events.out.tfevents")
            if is_events or (file.suffix in _LOGS and name not in _SKIPPED_NAMES and not name.startswith(".")):
                found.append(file)
        if num_seen > _MAX_SEEN:
            notes.append(f"only the first {count(num_seen)} files of `{path}` were looked at")
            break
    if runs:
        newest = max(runs, key=lambda run: (run / EVENTS).stat().st_mtime)
        if len(runs) > 1:
            notes.append(f"`{path}` has {count(len(runs))} runs; the newest, `{newest.relative_to(path)}`, was read")
        yield newest, newest.name
        return
    found.sort(key=lambda file: (len(file.relative_to(path).parts), str(file)))
    states = [file for file in found if file.name == "trainer_state.json"]
    if len(states) > 1:  # each checkpoint has a copy: the newest holds the whole history
        newest = max(states, key=lambda file: file.stat().st_mtime)
        found = [file for file in found if file.name != "trainer_state.json" or file == newest]
    if len(found) > _MAX_FILES:
        notes.append(f"{count(len(found) - _MAX_FILES)} of {count(len(found))} files in `{path}` were not read")
    for file in found[:_MAX_FILES]:
        yield file, str(file.relative_to(path))


def _read(file: Path, name: str, refused: list[str]) -> Reading | None:
    """Read a file, or add the reason to `refused` and return None."""
    try:
        with open_file(file) as stream:
            head = stream.read(_HEAD)
            if name.rpartition("/")[2].startswith("events.out.tfevents"):
                stream.seek(0)
                return _read_bytes("\n".join(event_lines(stream)).encode(), name)
            if (reason := _refusal(file, head)) is not None:
                refused.append(f"`{name}` {reason}")
                return None
            size = file.stat().st_size
            stream.seek(0)
            if file.suffix in (".ipynb", ".json") and size <= _MAX_JSON:
                return _read_bytes(stream.read(), name)
            return read_stream(stream, name=name)
    except OSError as error:
        refused.append(f"`{name}` cannot be read: {error.strerror or error}")
        return None


def _refusal(file: Path, head: bytes) -> str | None:
    """Return why a file is not read, or None."""
    if head[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
        return "is a pickle, which can run code when it is loaded; it was not loaded"
    is_zip = head.startswith(b"PK\x03\x04")
    if is_zip and (file.suffix in _PICKLES or b"data.pkl" in head):
        return "is a torch file with a pickle inside; it was not loaded"
    for magic, kind in _ARCHIVES.items():
        if head.startswith(magic):
            return f"is {kind}; unpack it and give its log"
    if head.startswith(b"version https://git-lfs"):
        return None
    if file.suffix in (".safetensors", ".gguf", ".parquet", ".arrow", ".so"):
        return f"is a binary file ({size_bytes(file.stat().st_size)}), not a log"
    if 0 in head and utf16_of(head) is None:
        return "is a binary file, not a log"
    return None


def _read_bytes(data: bytes, name: str | None) -> Reading:
    text = _as_text(data)
    reading = read_document(read_chunks(io.BytesIO(data if text is None else text.encode())), name=name)
    if reading.is_small:
        reading.text = text or data.decode("utf-8", "replace")
    return reading


def _as_text(data: bytes) -> str | None:
    """Return the text of a notebook or of a state file with a long history, or None for any other text."""
    if not data[:SMALL_BYTES].lstrip().startswith(b"{") or not (b'"cells"' in data or b'"log_history"' in data):
        return None
    try:
        found = parse_json(data)
    except ValueError:
        return None
    if isinstance(found.get("cells"), list):
        return notebook_text(found)
    history = found.get("log_history")
    if isinstance(history, list) and len(data) > SMALL_BYTES:
        return "\n".join(json.dumps(entry) for entry in history)
    return None
