"""The export target protocol: the methods a class must implement to add an output format to `tunewell export`.

requires, preflight   before training, and before the model is loaded
disk_use              before the first byte is written
write                 into a staging folder; returns the artefacts
prove                 in a new process, from the files alone
next_step             after the export is in its final folder
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
from tunewell.data.tokenizers.load import LoadedTokenizer
from tunewell.export.card import CardFacts, model_card
from tunewell.export.chat_template import SavedTemplate
from tunewell.export.options import ExportOptions
from tunewell.export.proof.reference import ProofContext, Reference
from tunewell.inference.chat_model import ChatModel
from tunewell.records.parity import Artefact, Check


@dataclass(frozen=True)
class Requirements:
    """The requirements of a target, besides the trained model."""

    targets: tuple[str, ...] = ()
    """Other targets whose files this target uses; they are exported too."""
    packages: tuple[str, ...] = ()
    """Python packages of the extra `export`."""
    llama_cpp: bool = False
    """Whether a build of llama.cpp is needed, to verify the files."""
    adapter: bool = False
    """Whether a trained adapter is needed, with a base model that its users can load."""
    merged_weights: bool = False
    """Whether the adapter is merged into the weights before `write` is called."""


@dataclass(frozen=True, eq=False)
class PreflightFacts:
    """The tokenizer, chat template and config of a model, which can be read without loading its weights."""

    tokenizer: LoadedTokenizer
    template: SavedTemplate
    read_config: Callable[[], Mapping[str, Any]]
    """Function that returns the `config.json` of the text model."""


@dataclass(frozen=True)
class DiskUse:
    """The disk space that a target needs."""

    written: dict[str, int]
    """Bytes by artefact name, e.g. `gguf q8_0`."""


@dataclass(frozen=True)
class NextStep:
    """The next command for the user after a finished export."""

    command: str
    notes: tuple[str, ...] = ()
    installed_as: str | None = None
    """The model's name in another program, if it is already installed there."""


@dataclass
class ExportContext:
    """The inputs of `ExportTarget.write`."""

    model: ChatModel
    """The trained model in fp32 on the CPU."""
    template: SavedTemplate
    staging_dir: Path
    options: ExportOptions
    card: CardFacts
    stop_ids: Sequence[int]
    progress: ProgressListener
    reference: Reference = field(init=False)
    """The reference for the verification, set once it is computed. A target may extend it in `write`."""
    artefacts: list[Artefact] = field(default_factory=list)
    """Artefacts kept from an earlier export, or written by earlier targets."""
    notes: list[str] = field(default_factory=list)

    def generation_config(self) -> Any:
        """Return the model's generation config with the stop ids of training."""
        settings = self.model.model.generation_config
        assert settings is not None
        settings.eos_token_id = list(self.stop_ids) or None
        settings.pad_token_id = None
        return settings

    def write_card(self, folder: Path, *, library: str, example: str) -> None:
        """Write the README of an artefact's folder; `example` is Python code that loads it with `library`."""
        text = model_card(self.card, library=library, example=example)
        (folder / "README.md").write_text(text, encoding="utf-8")

    def artefact(self, kind: str, precision: str, path: Path) -> Artefact:
        """Return the record of a finished file or folder, with the hash of every file."""
        files = [file for file in sorted((path, *path.rglob("*"))) if file.is_file()]
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
    """Name in `export.to`, and of the artefact's folder in the export."""
    requires: ClassVar[Requirements] = Requirements()

    def formats(self, options: ExportOptions) -> tuple[str, ...]:
        """Return the formats to write, one artefact each; empty for a target that writes a single folder."""
        return ()

    def preflight(self, facts: PreflightFacts) -> None:  # noqa: B027  most targets accept every model
        """Raise UserError if the model cannot be exported to this target."""

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
        """Return True if weights are stored without rounding; "" is a target that uses another target's files."""
        return precision in ("", "fp32", "f32")

    def next_step(self, folder: Path, artefacts: Sequence[Artefact], options: ExportOptions) -> NextStep | None:
        """Return the next command for the published export, or None if it is only `tunewell verify`."""
        return None


def load_target(name: str) -> ExportTarget:
    """Import a target; raise UserError for an unknown name."""
    return EXPORT_TARGETS.load(name)()


def load_targets(names: Iterable[str]) -> list[ExportTarget]:
    """Return these targets and the targets they require, in the order they are written."""
    found: dict[str, ExportTarget] = {}
    pending = list(names)
    while pending:
        name = pending.pop()
        if name not in found:
            found[name] = load_target(name)
            pending += found[name].requires.targets
    return [found[name] for name in EXPORT_TARGETS.names() if name in found]
