"""What proving an export takes beside its files: said where it is missing, for that is no fault of the export."""

from collections.abc import Collection

from tunewell.core.need import need
from tunewell.exporting.llama_cpp import find_llama


def need_all(kinds: Collection[str]) -> None:
    """Raise UserError, with the command that installs it, for whatever one of these kinds cannot be proven without."""
    if "adapter" in kinds:
        need("peft", extra="export", purpose="proving an adapter")
    if {"gguf", "ollama"} & set(kinds):
        need("gguf", extra="export", purpose="a GGUF file")
        find_llama()
