"""The export targets that `export.to` and `--to` can name: their names, descriptions and import paths.

To add a target, write `export/targets/NAME.py` (see `export/targets/base.py`) and add one line here. Import paths are
strings, so listing names imports no torch.
"""

from typing import Literal

from tunewell.core.registry import Entry, Registry

_TARGETS = "tunewell.export.targets"
EXPORT_TARGETS: Registry[Entry] = Registry(
    "export target",
    [
        Entry("adapter", "the adapter in PEFT format, without the base model", f"{_TARGETS}.adapter:AdapterTarget"),
        Entry("merged", "the whole model in transformers format", f"{_TARGETS}.merged:MergedTarget"),
        Entry("gguf", "GGUF files for llama.cpp", f"{_TARGETS}.gguf:GgufTarget"),
        Entry("ollama", "a GGUF file with an Ollama Modelfile", f"{_TARGETS}.ollama:OllamaTarget"),
    ],
)
"""In the order in which they are written: a target may use the files of an earlier one."""
GgufFormat = Literal["f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q4_k_m"]
MergedPrecision = Literal["bf16", "fp16", "fp32"]
