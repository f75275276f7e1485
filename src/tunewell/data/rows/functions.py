"""Load and apply a function of the user's that maps rows before they are converted."""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.files import sha256_text


@dataclass
class RowFunction:
    """A function of the user's, known by the text of its file and its name."""

    function: Callable[[Any], Any]
    name: str
    batch: int | None
    sha256: str

    def apply(self, rows: list[Any], numbers: Sequence[int], source: str) -> list[Any]:
        """Map rows one at a time or in batches; the number that comes back must be the number that went in."""
        step = self.batch or 1
        mapped: list[Any] = []
        for start in range(0, len(rows), step):
            some = rows[start : start + step]
            where = f"{source} row {numbers[start]}" + (f" to {numbers[start + len(some) - 1]}" if self.batch else "")
            num_given = len(some)
            result = self._call(some if self.batch else some[0], where)
            if self.batch:
                self._check(result, num_given, where)
            mapped += result if self.batch else [result]
        return mapped

    def _call(self, argument: Any, where: str) -> Any:
        try:
            return self.function(argument)
        except (Exception, SystemExit) as error:
            raise UserError(
                f"`{self.name}` failed: {_told(error)}",
                where=where,
                fix="mend the function; it may return None for a row to leave out",
            ) from error

    def _check(self, result: Any, num_given: int, where: str) -> None:
        if isinstance(result, list) and len(result) == num_given:
            return
        found = f"{len(result)} rows" if isinstance(result, list) else f"a {type(result).__name__}"
        raise UserError(
            f"`{self.name}` got {num_given} rows and gave back {found}",
            where=where,
            fix="return a list with one entry for each row, None for a row to leave out",
        )


def load_row_function(reference: str, *, batch: int | None, base: Path) -> RowFunction:
    """Load `file.py:function`; raise UserError when it is not there or its file cannot be run."""
    file_name, _, name = reference.rpartition(":")
    path = base / Path(file_name).expanduser()
    if not file_name or not path.is_file():
        raise UserError(f"there is no `{reference}`", fix="write it as `file.py:function`, beside the config")
    try:
        source = path.read_bytes()
        module = _run(path, source)
    except (Exception, SystemExit) as error:
        raise UserError(
            f"`{file_name}` cannot be loaded: {_told(error)}",
            fix="keep what it needs in this one file, so that every change of it is noticed"
            if isinstance(error, ImportError)
            else None,
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        found = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UserError(
            f"`{file_name}` has no function `{name}`", fix=f"it has {', '.join(found)}" if found else "define it there"
        )
    # The name counts too: two functions of one file make different rows of the same ones.
    return RowFunction(function, reference, batch, sha256_text(name, source.decode("utf-8", "replace")))


class _FromText(importlib.abc.InspectLoader):
    """Runs exactly the text that was hashed; Python's own loader may run an older compiled copy of the file."""

    def __init__(self, path: Path, source: bytes) -> None:
        self.path = path
        self.source = source

    def get_source(self, fullname: str) -> str:
        return importlib.util.decode_source(self.source)

    def get_code(self, fullname: str) -> Any:
        return self.source_to_code(self.source, str(self.path))


def _run(path: Path, source: bytes) -> ModuleType:
    name = f"tunewell_user_{path.stem}_{sha256_text(str(path.resolve()))[:8]}"
    spec = importlib.util.spec_from_loader(name, _FromText(path, source), origin=str(path))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(path)
    # A dataclass looks its own module up here.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
