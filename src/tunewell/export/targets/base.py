"""The export target protocol: what a class must implement to add an output format to `tunewell export`.

requires, preflight   before training, and before the model is loaded
disk_use              before the first byte is written
write                 into a staging folder; returns the artefacts
prove                 in a new process, from the files alone
next_step             after the export got its final name
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from tunewell.config.extensions import EXPORT_TARGETS
from tunewell.core.files import sha256_file
from tunewell.core.progress import Progress, ProgressListener
from tunewell.core.units import size_bytes
from tunewell.data.text_pipeline import TextPipeline
from tunewell.data.tokenizers.load import LoadedTokenizer
from tunewell.export.card import CardFacts, model_card
from tunewell.export.chat_template import SavedTemplate
from tunewell.export.options import ExportOptions
from tunewell.export.proof.reference import ProofContext, Reference
from tunewell.inference.chat_model import ChatModel
from tunewell.records.parity import Artefact, Check


@dataclass(frozen=True)
class Requirements:
    """What a target needs besides the trained model."""

    targets: tuple[str, ...] = ()
    """Targets whose files it uses; they are written too."""
    packages: tuple[str, ...] = ()
    """Python packages of the extra `export`."""
    llama_cpp: bool = False
    """A build of llama.cpp, to prove the files."""
    adapter: bool = False
    """A trained adapter, and a base model that its users can load."""
    merged_weights: bool = False
    """The adapter merged into the weights. Without it, `write` sees the adapter beside them."""


@dataclass(frozen=True)
class PreflightFacts:
    """The model's small files: known before it is trained, and before its weights are loaded."""

    tokenizer: LoadedTokenizer
    template: SavedTemplate
    read_config: Callable[[], Mapping[str, Any]]
    """Returns `config.json` of the text model."""


@dataclass(frozen=True)
class DiskUse:
    """The bytes that a target writes."""

    written: dict[str, int]
    """By artefact name, e.g. `gguf q8_0`."""
    temporary_bytes: int = 0
    """Files that exist only during the export."""


@dataclass(frozen=True)
class NextStep:
    """What the user can do with a finished export."""

    command: str
    notes: tuple[str, ...] = ()
    installed_as: str | None = None
    """The name under which another program already has the model."""


@dataclass
class ExportContext:
    """What `write` works with."""

    model: ChatModel
    """The trained model in fp32 on the CPU."""
    text: TextPipeline
    template: SavedTemplate
    staging_dir: Path
    options: ExportOptions
    card: CardFacts
    stop_ids: Sequence[int]
    progress: ProgressListener
    reference: Reference = field(init=False)
    """What the proof compares with, once it is computed. A target may extend it in `write`."""
    artefacts: list[Artefact] = field(default_factory=list)
    """Kept from an earlier export, and written by earlier targets."""
    notes: list[str] = field(default_factory=list)

    def generation_config(self) -> Any:
        """Return the model's generation settings with the stop ids of training."""
        settings = self.model.model.generation_config
        assert settings is not None
        settings.eos_token_id = list(self.stop_ids) or None
        settings.pad_token_id = None
        return settings

    def write_card(self, folder: Path, *, library: str, example: str) -> None:
        """Write the README of an artefact's folder: `library` loads it, `example` is Python code that does so."""
        text = model_card(self.card, library=library, example=example)
        (folder / "README.md").write_text(text, encoding="utf-8")

    def artefact(self, kind: str, precision: str, path: Path) -> Artefact:
        """Describe a finished file or folder, with the hash of every file."""
        files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        num_bytes = sum(file.stat().st_size for file in files)
        self.progress(Progress(f"wrote {path.name}, {size_bytes(num_bytes)}"))
        return Artefact(
            kind=kind,
            precision=precision,
            path=path.relative_to(self.staging_dir).as_posix(),
            num_bytes=num_bytes,
            sha256s={file.relative_to(self.staging_dir).as_posix(): sha256_file(file) for file in files},
        )


class ExportTarget(ABC):
    """One output format of `tunewell export`."""

    name: ClassVar[str]
    """As in `export.to`; the artefact's folder in the export has the same name."""
    requires: ClassVar[Requirements] = Requirements()

    def formats(self, options: ExportOptions) -> tuple[str, ...]:
        """Return the formats to write, one artefact each; empty for a target that is one folder."""
        return ()

    def preflight(self, facts: PreflightFacts) -> None:  # noqa: B027  most targets accept every model
        """Raise UserError if this model can never be exported to this target."""

    @abstractmethod
    def disk_use(self, context: ExportContext) -> DiskUse:
        """Estimate the bytes that `write` will write."""

    @abstractmethod
    def write(self, context: ExportContext) -> list[Artefact]:
        """Write the files into the staging folder."""

    @abstractmethod
    def prove(self, artefact: Artefact, context: ProofContext) -> list[Check]:
        """Compare the files with the trained model.

        Raise ProofUnavailable if something outside of the export is missing, e.g. the base model of an adapter. Any
        other exception counts as a failed check.
        """

    def is_exact(self, precision: str) -> bool:
        """Return True if the stored weights are those of training, without rounding; "" uses another target's files."""
        return precision in ("", "fp32", "f32")

    def next_step(self, folder: Path, artefacts: Sequence[Artefact], options: ExportOptions) -> NextStep | None:
        """Return what to do with the published export; None if `tunewell verify` is the only suggestion."""
        return None


def load_target(name: str) -> ExportTarget:
    """Import a target; raise UserError for an unknown name."""
    return EXPORT_TARGETS.load(name)()


def load_targets(names: Iterable[str]) -> list[ExportTarget]:
    """Return these targets and the ones they require, in the order in which they are written."""
    found: dict[str, ExportTarget] = {}
    pending = list(names)
    while pending:
        name = pending.pop()
        if name not in found:
            found[name] = load_target(name)
            pending += found[name].requires.targets
    return [found[name] for name in EXPORT_TARGETS.names() if name in found]
