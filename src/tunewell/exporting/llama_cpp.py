"""Open GGUF files in a real llama.cpp: any recent build of it on this machine, called from Python, nothing compiled."""

from functools import cache
from pathlib import Path

from tunewell.core.errors import UserError
from tunewell.exporting.llama_cpp_calls import Calls, Unusable
from tunewell.exporting.llama_cpp_model import LlamaModel
from tunewell.exporting.llama_cpp_places import VARIABLE, Place, known_places, named_place


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
