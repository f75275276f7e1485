"""Rows given from memory: a list of dicts, a `datasets.Dataset` or a pandas DataFrame, saved as a JSON lines file."""

import hashlib
import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from tunewell.core.errors import UserError
from tunewell.core.files import write_atomic

ROWS_FOLDER = Path(".tunewell") / "rows"
"""Where rows from memory are saved, from the current folder: a run must find them again when it is resumed."""
_FIX = "give a path, a list of paths, a list of dicts, a `datasets.Dataset` or a pandas DataFrame"


def data_paths(data: Any) -> list[str] | None:
    """Return the paths that `data` names; rows from memory are saved first. None stays None.

    The file is named after a hash of its content, so that equal rows give the same file and the corpus is not rebuilt.
    """
    if data is None:
        return None
    if isinstance(data, str | Path):
        return [str(data)]
    if isinstance(data, Sequence) and data and all(isinstance(entry, str | Path) for entry in data):
        return [str(entry) for entry in data]
    return [str(_save(_rows_of(data)))]


def _rows_of(data: Any) -> Iterable[Any]:
    kind = f"{type(data).__module__.partition('.')[0]}.{type(data).__name__}"
    if kind == "pandas.DataFrame":
        return data.to_dict(orient="records")
    if kind in ("datasets.DatasetDict", "datasets.IterableDatasetDict"):
        names = ", ".join(f"`{name}`" for name in data)
        raise UserError(f"`data` is a dataset with several splits: {names}", fix='choose one, e.g. `data["train"]`')
    if kind in ("datasets.Dataset", "datasets.IterableDataset") or isinstance(data, list | tuple):
        return data
    raise UserError(f"`data` cannot be a {type(data).__name__}", fix=_FIX)


def _save(rows: Iterable[Any]) -> Path:
    ROWS_FOLDER.mkdir(parents=True, exist_ok=True)
    digest, num_rows = hashlib.sha256(), 0
    with tempfile.NamedTemporaryFile(dir=ROWS_FOLDER, suffix=".tmp") as file:
        for number, row in enumerate(rows, start=1):
            line = _line(row, number)
            digest.update(line)
            file.write(line)
            num_rows = number
        if not num_rows:
            raise UserError("`data` holds no rows", fix=_FIX)
        file.flush()
        path = ROWS_FOLDER / f"{digest.hexdigest()[:16]}.jsonl"
        if not path.is_file():
            write_atomic(path, Path(file.name).read_bytes())
    return path


def _line(row: Any, number: int) -> bytes:
    if not isinstance(row, Mapping):
        raise UserError(f"row {number} of `data` is a {type(row).__name__}, not a dict", fix=_FIX)
    try:
        return orjson.dumps(_plain(dict(row)), option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError as error:
        raise UserError(f"row {number} of `data` cannot be written as JSON: {error}", fix=_FIX) from error


def _plain(value: Any) -> Any:
    """Replace NaN, which pandas puts into empty cells, by null."""
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value
