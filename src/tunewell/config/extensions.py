"""Registries of training methods, optimizers and export targets: their names, descriptions and import paths.

They are the values of `method.kind`, `train.optimizer` and `export.to`. To add one, write its file (see
`methods/base.py`, `training/optimizers/base.py`, `export/targets/base.py`) and add one line here. Import paths are
strings, so listing names imports no torch.
"""

from dataclasses import dataclass
from typing import Literal

from tunewell.core.registry import Entry, Registry


@dataclass(frozen=True)
class MethodEntry(Entry):
    """A training method, with what can be known about it without torch."""

    title: str
    """The name on screens: `LoRA`."""
    is_adapter: bool
    """Whether a checkpoint holds an adapter, to be loaded on top of the base model, and not a whole model."""


METHODS: Registry[MethodEntry] = Registry(
    "training method",
    [
        MethodEntry("lora", "small added matrices", "tunewell.methods.lora:Lora", "LoRA", is_adapter=True),
        MethodEntry("full", "every weight", "tunewell.methods.full:Full", "full fine-tuning", is_adapter=False),
    ],
)


OPTIMIZERS: Registry[Entry] = Registry(
    "optimizer",
    [Entry("adamw", "AdamW, with two fp32 moments for each parameter", "tunewell.training.optimizers.adamw:AdamW")],
)


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
