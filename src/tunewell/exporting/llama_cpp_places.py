"""Where a llama.cpp library may lie on this machine: installed packages and the system's own folders, in order."""

import ctypes.util
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tunewell.core.errors import UserError

VARIABLE = "TUNEWELL_LLAMA_CPP"
"""Names a library, or the folder it lies in, for people who built their own."""

_NAMES = ("libllama.so", "libllama.dylib", "llama.dll", "libllama.so.*", "libllama.*.dylib", "libllama.v*.so")
# Built into a Python module, which exports what it is made of, except on Windows.
_MODULES = ("xllamacpp*.so",)
_PACKAGES = (("xllamacpp", _MODULES), ("llama_cpp", ("lib/*llama.*",)), ("llama_cpp_py_sync", _NAMES))


@dataclass(frozen=True)
class Place:
    """A file that may be llama.cpp, and who put it there."""

    path: Path
    origin: str


def named_place(named: Path | None) -> Place | None:
    """Find the library that the caller or the variable names; None when neither does."""
    told = str(named) if named is not None else os.environ.get(VARIABLE)
    if not told:
        return None
    origin = "the path given" if named is not None else VARIABLE
    path = Path(told).expanduser().resolve()
    if path.is_dir():
        path = next(_files(path, (*_NAMES, *_MODULES)), path)
    if not path.is_file():
        raise UserError(
            "there is no llama.cpp library at the path named",
            where=f"{origin}: {told}",
            fix="name a `libllama` file or the folder it lies in",
        )
    return Place(path, origin)


def known_places() -> Iterator[Place]:
    """List the libraries of installed packages, then the system's; packages are looked up, never imported."""
    for package, names in _PACKAGES:
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            for file in _files(Path(folder), names):
                yield Place(file, f"package {package}")
    if found := ctypes.util.find_library("llama"):
        yield Place(Path(found), "the system's libraries")


def _files(folder: Path, names: tuple[str, ...]) -> Iterator[Path]:
    """List one file for each pattern, the plainest name first."""
    for name in names:
        if found := sorted(folder.glob(name), key=lambda file: (len(file.name), file.name)):
            yield found[0]
