"""Open GGUF files in a real llama.cpp: any recent build of it on this machine, called from Python, nothing compiled."""

import ctypes.util
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tunewell.core.errors import UserError
from tunewell.inference.llama_cpp.calls import Calls, Unusable
from tunewell.inference.llama_cpp.model import LlamaModel

# Where a llama.cpp library may lie on this machine: installed packages and the system's own folders, in order.

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


class LlamaLibrary:
    """A llama.cpp that was found, checked and loaded; it stays loaded until the process ends."""

    def __init__(self, calls: Calls, origin: str) -> None:
        self.calls = calls
        self.path = calls.path
        self.origin = origin
        """Who put it there: a package, the system, or the person."""

    @property
    def version(self) -> str:
        return self.calls.version

    @property
    def has_quantizer(self) -> bool:
        """Whether llama.cpp's own program for quantising is inside."""
        return self.calls.has_all("llama_model_quantize", "llama_model_quantize_default_params")

    def open(self, path: Path, *, context: int, threads: int | None = None) -> LlamaModel:
        """Open a GGUF file for texts of up to `context` tokens; threads are as many as there are cores unless given.

        Raises UserError for a file that is missing, damaged, cut short, or of an architecture this build does not know.
        """
        return LlamaModel(self.calls, path, context=context, threads=threads)


def find_llama(path: Path | None = None) -> LlamaLibrary:
    """Find llama.cpp: where the path or TUNEWELL_LLAMA_CPP says, else in an installed package, else on the system.

    Raises UserError when there is none, saying what was tried, and when the one that was named cannot be used.
    """
    if named := named_place(path):
        try:
            return _library(named)
        except Unusable as problem:
            raise UserError(
                f"the llama.cpp library that was named {problem}",
                where=str(named.path),
                fix=f'name another one, or none and run `pip install "tunewell[export]"` ({named.origin})',
            ) from None
    tried = []
    for place in known_places():
        try:
            return _library(place)
        except Unusable as problem:
            tried.append(f"{place.origin}: `{place.path.name}` {problem}")
    raise UserError(
        "no llama.cpp library that can be used was found",
        where="; ".join(tried) or "tried the packages xllamacpp, llama_cpp and llama_cpp_py_sync, and the system",
        fix=f'pip install "tunewell[export]", or name a `libllama` file with {VARIABLE}',
    )


def _library(place: Place) -> LlamaLibrary:
    return LlamaLibrary(_calls(place.path), place.origin)


@cache
def _calls(path: Path) -> Calls:
    """Load each library once: its log is one for the whole process."""
    return Calls(path)
