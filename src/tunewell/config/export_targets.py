"""The export targets: the values of `export.to` and `--to`, with the class that writes and proves each.

To add a target, write `export/targets/NAME.py` (see `export/targets/base.py`) and add one line here.
"""

from tunewell.core.registry import Entry, Registry

_TARGETS = "tunewell.export.targets"

EXPORT_TARGETS = Registry(
    "export target",
    [
        Entry("adapter", "LoRA weights in PEFT format, without the base model", f"{_TARGETS}.adapter:AdapterTarget"),
        Entry("merged", "the whole model in transformers format, adapter merged", f"{_TARGETS}.merged:MergedTarget"),
        Entry("gguf", "GGUF files for llama.cpp, one for each `--gguf` type", f"{_TARGETS}.gguf:GgufTarget"),
        Entry("ollama", "a GGUF file with an Ollama Modelfile", f"{_TARGETS}.ollama:OllamaTarget"),
    ],
)
"""In the order in which targets are written: a target may need the files of an earlier one."""
