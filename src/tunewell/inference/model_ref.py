"""A resolved reference to a run, an adapter or a model, with everything needed to load it. No torch is imported."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from tunewell.config.load import LoadedConfig
from tunewell.core.errors import UserError
from tunewell.model_files.presets import is_preset
from tunewell.models.base_content import content_changes
from tunewell.records.base_model import BaseContent
from tunewell.records.manifest import MANIFEST
from tunewell.records.plan import Plan


@dataclass(frozen=True)
class ModelRef:
    """A reference to a checkpoint of a run, an adapter or a model, on disk or on the hub."""

    name: str
    """The name shown to the user."""
    kind: Literal["run", "adapter", "model"]
    path: Path | None
    """The folder of the run or adapter, or the model's path; None for a hub id."""
    model: str
    """The model to load first: the base model of an adapter, or the model itself."""
    adapter: Path | None
    base: str | None
    """The base model; None if unknown."""
    loaded: LoadedConfig
    """The config of the run. For an adapter or a model, a config in which only the model is set."""
    added_tokens: tuple[str, ...] = ()
    """Tokens that were added to the model's tokenizer for the corpus."""
    plan: Plan | None = None
    start: Path | None = None
    """The adapter from which the run went on training; None if it started from the base model itself."""
    step: int | None = None
    because: str = ""
    """Why this checkpoint was chosen."""
    notes: list[str] = field(default_factory=list)
    trained_on: BaseContent | None = None
    """The content of the base model in training; None if it is not known."""

    def base_changes(self) -> list[str]:
        """Return how the base model differs from the one in training, one line each."""
        if self.plan and is_preset(self.plan.model) and self.loaded.config.seed != self.plan.seed:
            return [f"the seed of its weights is {self.loaded.config.seed}, not {self.plan.seed}"]
        return content_changes(self.base, self.trained_on) if self.base and self.trained_on else []

    def require_base(self) -> None:
        """Raise UserError if the base model of an adapter has changed since training."""
        if self.adapter and (changes := self.base_changes()):
            raise UserError(
                f"the base model `{self.base}` has changed since `{self.name}` was trained on it",
                where="; ".join(changes),
                fix="restore the model, or train again",
            )

    @property
    def corpus(self) -> Path | None:
        """The corpus of the run; None if this is not a run or the corpus was deleted."""
        folder = self.loaded.path(self.loaded.config.corpus)
        return folder if self.kind == "run" and (folder / MANIFEST).is_file() else None

    @property
    def method(self) -> str:
        """The name of the training method; empty if unknown."""
        if self.plan is not None:
            return self.plan.method.value
        if self.adapter is None:
            return ""
        from tunewell.methods.base import adapter_method  # imports torch

        return adapter_method(self.adapter) or ""

    @property
    def is_open_book(self) -> bool:
        """Whether the run was trained to answer from passages (`data.index`)."""
        return bool(self.plan and (self.plan.config.get("data") or {}).get("index"))

    @property
    def started_from(self) -> str | None:
        """The model with which this one is compared: the adapter where the run started, or the base model."""
        return self.base if self.start is None else str(self.start)

    def base_ref(self) -> "ModelRef":
        """Return a reference to the model where training started, with the same tokenizer and chat template."""
        assert self.base is not None
        return replace(self, name=self.started_from or "", model=self.base, adapter=self.start, base=None, start=None)
