"""Registries of training methods, optimizers and export targets: names, descriptions and import paths.

The names are the values of `method.kind`, `train.optimizer` and `export.to`. To add an implementation, write its file
(see `methods/base.py`, `training/optimizers/base.py`, `export/targets/base.py`) and add one line here. Import paths are
strings, so listing the names does not import torch.
"""

from dataclasses import dataclass
from typing import Literal

from tunewell.core.registry import Entry, Registry


@dataclass(frozen=True)
class MethodEntry(Entry):
    """A training method, with the properties that are needed without torch."""

    title: str
    """The name on screens: `LoRA`."""
    is_adapter: bool
    """Whether a checkpoint contains an adapter for the base model, and not a whole model."""


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
"""Export targets in the order in which they are written: a target may use the files of an earlier one."""
GgufFormat = Literal["f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q4_k_m"]
MergedPrecision = Literal["bf16", "fp16", "fp32"]
