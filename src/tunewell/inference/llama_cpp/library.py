"""Find a llama.cpp library on this machine and load it: installed packages first, then the system's libraries."""

import ctypes.util
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tunewell.core.errors import UserError
from tunewell.inference.llama_cpp.bindings import Bindings, UnusableLibrary
from tunewell.inference.llama_cpp.model import LlamaModel

VARIABLE = "TUNEWELL_LLAMA_CPP"
"""Environment variable with the path of a library or its folder, for users who built llama.cpp themselves."""

_NAMES = ("libllama.so", "libllama.dylib", "llama.dll", "libllama.so.*", "libllama.*.dylib", "libllama.v*.so")
# llama.cpp linked into a Python extension module, which exports its symbols except on Windows.
_MODULES = ("xllamacpp*.so",)
_PACKAGES = (("xllamacpp", _MODULES), ("llama_cpp", ("lib/*llama.*",)), ("llama_cpp_py_sync", _NAMES))


class Candidate(NamedTuple):
    """A file that may be a llama.cpp library, and where it comes from."""

    path: Path
    origin: str


def named_candidate(named: Path | None) -> Candidate | None:
    """Return the library that the caller or the environment variable names; None if neither does."""
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
            fix="name a `libllama` file or its folder",
        )
    return Candidate(path, origin)


def installed_candidates() -> Iterator[Candidate]:
    """Yield the libraries of installed packages, then the system's; packages are located, not imported."""
    for package, names in _PACKAGES:
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            for file in _files(Path(folder), names):
                yield Candidate(file, f"package {package}")
    if found := ctypes.util.find_library("llama"):
        yield Candidate(Path(found), "the system's libraries")


def _files(folder: Path, names: tuple[str, ...]) -> Iterator[Path]:
    """Yield one file per pattern: the shortest name."""
    for name in names:
        if found := sorted(folder.glob(name), key=lambda file: (len(file.name), file.name)):
            yield found[0]


@dataclass(frozen=True)
class LlamaLibrary:
    """A loaded llama.cpp library; it stays loaded until the process ends."""

    bindings: Bindings
    origin: str
    """Where it was found: a package, the system's libraries, or a path that the user named."""

    def open(self, path: Path, *, context: int, threads: int | None = None) -> LlamaModel:
        """Open a GGUF file with a context of `context` tokens; the default is one thread per physical core.

        Raises UserError for a file that is missing, damaged or truncated, or whose architecture this build lacks.
        """
        return LlamaModel(self.bindings, path, context=context, threads=threads)


def find_llama(path: Path | None = None) -> LlamaLibrary:
    """Load llama.cpp from the given path or TUNEWELL_LLAMA_CPP, else from an installed package, else from the system.

    Raises UserError if none is found, with what was tried, or if the named one cannot be used.
    """
    if named := named_candidate(path):
        try:
            return LlamaLibrary(_load_once(named.path), named.origin)
        except UnusableLibrary as problem:
            raise UserError(
                f"the named llama.cpp library {problem}",
                where=f"{named.path} ({named.origin})",
                fix='name another library, or name none and run `pip install "tunewell[export]"`',
            ) from None
    tried = []
    for candidate in installed_candidates():
        try:
            return LlamaLibrary(_load_once(candidate.path), candidate.origin)
        except UnusableLibrary as problem:
            tried.append(f"{candidate.origin}: `{candidate.path.name}` {problem}")
    raise UserError(
        "no usable llama.cpp library was found",
        where="; ".join(tried) or f"searched {', '.join(name for name, _ in _PACKAGES)} and the system's libraries",
        fix=f'pip install "tunewell[export]", or name a `libllama` file with {VARIABLE}',
    )


@cache
def _load_once(path: Path) -> Bindings:
    """Load each library once: a process has only one log callback."""
    return Bindings(path)
