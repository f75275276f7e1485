"""Load and apply the user's `map` function, which changes or drops rows before conversion.

A function gets a row, or a batch of rows in tunewell's form (a list) and in Hugging Face's form (columns by name). It
returns rows, texts or, for a batch, columns.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.files import read_bytes, sha256_text
from tunewell.data.rows.conversation import is_list, is_object


class RowBatch(list[Any]):
    """A list of rows that gives its columns by name, like a batch of `datasets.Dataset.map(batched=True)`."""

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return super().__getitem__(key)
        if key not in self.keys():
            raise KeyError(key)
        return [row.get(key) if is_object(row) else None for row in self]

    def __contains__(self, key: object) -> bool:
        return key in self.keys() if isinstance(key, str) else super().__contains__(key)

    def keys(self) -> list[str]:
        """Return the names of all columns, in the order of their first row."""
        return list(dict.fromkeys(key for row in self if is_object(row) for key in row))

    def items(self) -> Iterator[tuple[str, list[Any]]]:
        """Yield each column with its name."""
        return ((key, self[key]) for key in self.keys())

    def values(self) -> Iterator[list[Any]]:
        """Yield each column."""
        return (self[key] for key in self.keys())

    def get(self, key: str, default: Any = None) -> Any:
        """Return a column, or `default` if no row has it."""
        try:
            return self[key]
        except KeyError:
            return default


@dataclass
class RowFunction:
    """A `map` function, identified by the hash of its file and its name."""

    function: Callable[[Any], Any]
    name: str
    batch: int | None
    sha256: str

    def apply(self, rows: list[Any], numbers: Sequence[int], source: str) -> list[Any]:
        """Map rows one at a time or in batches; raise UserError if the number of rows of a batch changes."""
        step = self.batch or 1
        mapped: list[Any] = []
        for start in range(0, len(rows), step):
            some = rows[start : start + step]
            where = f"{source} row {numbers[start]}" + (f" to {numbers[start + len(some) - 1]}" if self.batch else "")
            num_rows = len(some)  # counted before the call, which may change the list
            result = self._call(RowBatch(some) if self.batch else some[0], where)
            mapped += self._rows_of(result, num_rows, where) if self.batch else [self._row_of(result, where)]
        return mapped

    def _call(self, argument: Any, where: str) -> Any:
        try:
            return self.function(argument)
        except (Exception, SystemExit) as error:
            raise UserError(
                f"`{self.name}` failed: {_describe(error)}",
                where=where,
                fix="correct the function; to drop a row, return None",
            ) from error

    def _row_of(self, result: Any, where: str) -> Any:
        texts = list(result.values()) if is_object(result) else [result]
        if texts and all(is_list(text) and text and all(isinstance(part, str) for part in text) for text in texts):
            raise UserError(
                f"`{self.name}` got one row and returned lists of texts, as a batched function of Hugging Face does",
                where=where,
                fix="set `map_batch: 1000` beside `map`",
            )
        return {"text": result} if isinstance(result, str) else result

    def _rows_of(self, result: Any, num_rows: int, where: str) -> list[Any]:
        """Return the rows of a batch from a list of rows or texts, or from columns."""
        if is_object(result):
            columns = {key: column for key, column in result.items() if is_list(column)}
            lengths = {key: len(column) for key, column in columns.items()}
            if len(columns) == len(result) and set(lengths.values()) == {num_rows}:
                return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
            found = ", ".join(f"{length} values of `{key}`" for key, length in lengths.items()) or "a dict"
        elif is_list(result) and len(result) == num_rows:
            return [{"text": row} if isinstance(row, str) else row for row in result]
        else:
            found = f"{len(result)} rows" if is_list(result) else f"a {type(result).__name__}"
        raise UserError(
            f"`{self.name}` got {num_rows} rows and returned {found}",
            where=where,
            fix="return a list with one entry for each row (None for a row to drop), or columns of that length",
        )


def load_row_function(reference: str, *, batch: int | None, base: Path) -> RowFunction:
    """Load `file.py:function`; raise UserError if it does not exist or its file cannot be imported."""
    file_name, _, name = reference.rpartition(":")
    path = base / Path(file_name).expanduser()
    if not file_name or not path.is_file():
        raise UserError(f"there is no `{reference}`", fix="write it as `file.py:function`, relative to the config")
    try:
        source = read_bytes(path)
        module = _run(path, source)
    except (Exception, SystemExit) as error:
        raise UserError(
            f"`{file_name}` cannot be loaded: {_describe(error)}",
            fix="put everything that the function needs into this one file, so that every change is detected"
            if isinstance(error, ImportError)
            else None,
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        found = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UserError(
            f"`{file_name}` has no function `{name}`",
            fix=f"use one of its functions: {', '.join(found)}" if found else "define the function in this file",
        )
    # The name is part of the hash, because two functions of one file give different rows.
    return RowFunction(function, reference, batch, sha256_text(name, source.decode("utf-8", "replace")))


def _run(path: Path, source: bytes) -> ModuleType:
    """Run exactly the hashed text. Python's import may run an outdated compiled copy of the file."""
    module = ModuleType(f"tunewell_user_{path.stem}_{sha256_text(str(path.resolve()))[:8]}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look up their module there
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)  # noqa: S102  the file is the user's own
    return module


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
