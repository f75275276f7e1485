"""The training methods that `method.kind` can name: their names, descriptions and import paths.

To add a method, write `methods/NAME.py` (see `methods/base.py`) and add one line here. Import paths are strings, so
listing names imports no torch.
"""

from dataclasses import dataclass
from typing import Annotated

from tunewell.config.fields import OneOf
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
MethodName = Annotated[str, OneOf(METHODS)]
