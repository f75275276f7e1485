"""Find and load a llama.cpp library: in installed Python packages first, then in the system's libraries."""

import ctypes.util
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tunewell.core.errors import UserError
from tunewell.core.optional import install_command
from tunewell.inference.llama_cpp.bindings import Bindings, UnusableLibrary
from tunewell.inference.llama_cpp.model import LlamaModel

VARIABLE = "TUNEWELL_LLAMA_CPP"
"""Environment variable with the path of a library or its folder, for users who build llama.cpp themselves."""

_NAMES = ("libllama.so", "libllama.dylib", "llama.dll", "libllama.so.*", "libllama.*.dylib", "libllama.v*.so")
# Python extension modules that contain llama.cpp and export its symbols, except on Windows.
_MODULES = ("xllamacpp*.so",)
_PACKAGES = (("xllamacpp", _MODULES), ("llama_cpp", ("lib/*llama.*",)), ("llama_cpp_py_sync", _NAMES))


class Candidate(NamedTuple):
    """A file that may be a llama.cpp library, and its origin."""

    path: Path
    origin: str


def named_candidate(named: Path | None) -> Candidate | None:
    """Return the library given by the caller or the environment variable, or None if neither is set."""
    text = str(named) if named is not None else os.environ.get(VARIABLE)
    if not text:
        return None
    origin = "the given path" if named is not None else VARIABLE
    path = Path(text).expanduser().resolve()
    if path.is_dir():
        path = next(_files(path, (*_NAMES, *_MODULES)), path)
    if not path.is_file():
        raise UserError(
            "no llama.cpp library at the given path",
            where=f"{origin}: {text}",
            fix="give the path of a `libllama` file or its folder",
        )
    return Candidate(path, origin)


def installed_candidates() -> Iterator[Candidate]:
    """Yield the libraries of installed packages, then those of the system. Packages are not imported."""
    for package, names in _PACKAGES:
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            for file in _files(Path(folder), names):
                yield Candidate(file, f"package {package}")
    if found := ctypes.util.find_library("llama"):
        yield Candidate(Path(found), "the system's libraries")


def _files(folder: Path, names: tuple[str, ...]) -> Iterator[Path]:
    """Yield one file per pattern: the one with the shortest name."""
    for name in names:
        if found := sorted(folder.glob(name), key=lambda file: (len(file.name), file.name)):
            yield found[0]


@dataclass(frozen=True)
class LlamaLibrary:
    """A loaded llama.cpp library. It stays loaded until the process ends."""

    bindings: Bindings
    origin: str
    """Where the library was found: a package, the system's libraries, or a path given by the user."""

    def open(self, path: Path, *, context: int, threads: int | None = None) -> LlamaModel:
        """Open a GGUF file with a context of `context` tokens. The default is one thread per physical core.

        Raises UserError if the file is missing, damaged or truncated, or if this build lacks its architecture.
        """
        return LlamaModel(self.bindings, path, context=context, threads=threads)


def find_llama(path: Path | None = None) -> LlamaLibrary:
    """Load llama.cpp from the given path, TUNEWELL_LLAMA_CPP, an installed package or the system, in this order.

    Raises UserError, which lists the libraries tried, if none can be used, or if the given library cannot be used.
    """
    named = named_candidate(path)
    tried = []
    for candidate in [named] if named else installed_candidates():
        try:
            return LlamaLibrary(_load_once(candidate.path), candidate.origin)
        except UnusableLibrary as problem:
            if named:
                raise UserError(
                    f"the given llama.cpp library {problem}",
                    where=f"{named.path} ({named.origin})",
                    fix=f"give the path of another library, or no path and run `{install_command('export')}`",
                ) from None
            tried.append(f"{candidate.origin}: `{candidate.path.name}` {problem}")
    raise UserError(
        "no usable llama.cpp library was found",
        where="; ".join(tried) or f"searched {', '.join(name for name, _ in _PACKAGES)} and the system's libraries",
        fix=f"{install_command('export')}, or set {VARIABLE} to the path of a `libllama` file",
    )


@cache
def _load_once(path: Path) -> Bindings:
    """Load each library only once, because a process has only one log callback."""
    return Bindings(path)
