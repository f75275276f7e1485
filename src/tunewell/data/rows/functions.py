"""Load and apply the user's `map` function, which changes or drops rows before conversion."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.files import sha256_text
from tunewell.data.rows.conversation import is_list


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
            result = self._call(some if self.batch else some[0], where)
            mapped += self._require_num_rows(result, num_rows, where) if self.batch else [result]
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

    def _require_num_rows(self, result: Any, num_rows: int, where: str) -> list[Any]:
        if is_list(result) and len(result) == num_rows:
            return result
        found = f"{len(result)} rows" if is_list(result) else f"a {type(result).__name__}"
        raise UserError(
            f"`{self.name}` got {num_rows} rows and returned {found}",
            where=where,
            fix="return a list with one entry for each row, and None for each row to drop",
        )


def load_row_function(reference: str, *, batch: int | None, base: Path) -> RowFunction:
    """Load `file.py:function`; raise UserError if it does not exist or its file cannot be imported."""
    file_name, _, name = reference.rpartition(":")
    path = base / Path(file_name).expanduser()
    if not file_name or not path.is_file():
        raise UserError(f"there is no `{reference}`", fix="write it as `file.py:function`, relative to the config")
    try:
        source = path.read_bytes()
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


class _FromText(SourceFileLoader):
    """A loader that runs exactly the hashed text. Python's loader may run an outdated compiled copy of the file."""

    source = b""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.source, self.path)


def _run(path: Path, source: bytes) -> ModuleType:
    name = f"tunewell_user_{path.stem}_{sha256_text(str(path.resolve()))[:8]}"
    loader = _FromText(name, str(path))
    loader.source = source
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up their module in `sys.modules`.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
