"""A resolved reference to a run, an adapter or a model: everything needed to load it."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from tunewell.config.load import LoadedConfig
from tunewell.methods.base import adapter_method
from tunewell.records.manifest import MANIFEST
from tunewell.records.plan import Plan


@dataclass(frozen=True)
class ModelRef:
    """A run's checkpoint, an adapter or a model, found on disk or named by a hub id."""

    name: str
    """The name shown to people."""
    kind: Literal["run", "adapter", "model"]
    path: Path | None
    """The folder of the run or adapter, or the model's path; None for a hub id."""
    model: str
    """The model to load first: the base of an adapter, or the model itself."""
    adapter: Path | None
    base: str | None
    """The base model it was trained from; None if unknown."""
    loaded: LoadedConfig
    """The config it was trained with; for an adapter or a model, a config that names only the model."""
    added_tokens: tuple[str, ...] = ()
    """Tokens that the corpus's tokenizer has in addition to the model's."""
    plan: Plan | None = None
    step: int | None = None
    because: str = ""
    """Why this checkpoint was chosen."""
    notes: list[str] = field(default_factory=list)

    @property
    def corpus(self) -> Path | None:
        """The run's corpus; None if this is not a run or the corpus was deleted."""
        folder = self.loaded.path(self.loaded.config.corpus)
        return folder if self.kind == "run" and (folder / MANIFEST).is_file() else None

    @property
    def method(self) -> str:
        """The name of the training method; empty if unknown."""
        if self.plan is not None:
            return self.plan.method.value
        return (adapter_method(self.adapter) or "") if self.adapter is not None else ""

    def base_ref(self) -> "ModelRef":
        """Return a reference to the base model, with the same tokenizer and chat template."""
        assert self.base is not None
        return replace(self, name=self.base, model=self.base, adapter=None, base=None)
