"""A resolved reference to a run, an adapter or a model, with everything needed to load it."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from tunewell.config.load import LoadedConfig
from tunewell.methods.base import adapter_method
from tunewell.records.manifest import MANIFEST
from tunewell.records.plan import Plan


@dataclass(frozen=True)
class ModelRef:
    """What was found, and all it takes to load it."""

    name: str
    """As a person would call it."""
    kind: Literal["run", "adapter", "model"]
    place: Path | None
    """The run's or the adapter's folder; None for a model that is no path."""
    model: str
    """What is loaded first: the base of an adapter, or the model itself."""
    adapter: Path | None
    base: str | None
    """The model it was made from; None where that is not known."""
    loaded: LoadedConfig
    """The config it was made with; for what is no run, one that names the model alone."""
    added_tokens: tuple[str, ...] = ()
    """Tokens that the corpus's tokenizer has beyond the model's."""
    plan: Plan | None = None
    step: int | None = None
    because: str = ""
    """Why this checkpoint."""
    notes: list[str] = field(default_factory=list)

    @property
    def corpus(self) -> Path | None:
        """Give the run's corpus, where it still is."""
        folder = self.loaded.path(self.loaded.config.corpus)
        return folder if self.kind == "run" and (folder / MANIFEST).is_file() else None

    @property
    def method(self) -> str:
        """Return the name of the training method; empty if it is not known."""
        if self.plan is not None:
            return self.plan.method.value
        return (adapter_method(self.adapter) or "") if self.adapter is not None else ""

    def as_base(self) -> "ModelRef":
        """Give what this was made from, to be loaded in its place with the same tokenizer and template."""
        assert self.base is not None
        return replace(self, name=self.base, model=self.base, adapter=None, base=None)
