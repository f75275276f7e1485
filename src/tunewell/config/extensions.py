"""Registries of row formats, methods, optimizers, engines, export targets and trackers, with their import paths.

The names are the values of `data.sources.format`, `method.kind`, `train.optimizer`, `export.to` and `track`. To add an
implementation, write its file (see `docs/extending.md`) and add one line here. Import paths are strings, so listing the
names does not import torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Literal

from tunewell.config.prices import (
    Activations,
    Shape,
    adamw8bit_bytes,
    adamw_bytes,
    dora_weights,
    galore_bytes,
    lora_matrices,
    no_weights,
    saved_tables,
    weights_of_layers,
)
from tunewell.core.features import extension_entries
from tunewell.core.files import read_data
from tunewell.core.registry import Entry, Registry

if TYPE_CHECKING:
    from tunewell.config.schema import MethodSettings, Train
    from tunewell.model_files.shape import ModelShape


@dataclass(frozen=True)
class MethodEntry(Entry):
    """A training method, with the properties that are needed without torch."""

    title: str
    """The name on screens: `LoRA`."""
    is_adapter: bool
    """Whether a checkpoint contains an adapter for the base model, and not a whole model."""
    learning_rate: float = 2e-4
    """The default learning rate."""
    _: KW_ONLY
    trains: Callable[["ModelShape", "MethodSettings"], Sequence[Shape]]
    """The shapes of the base model's own weights that are trained. Those not known one by one may be one vector."""
    adds: Callable[[int, int, "MethodSettings"], Sequence[Shape]] = no_weights
    """The shapes of the weights that are added to a selected linear layer: `(inputs, outputs, settings)`."""
    activations: Activations
    """What a layer saves for the backward pass."""


METHODS: Registry[MethodEntry] = Registry(
    "training method",
    [
        MethodEntry(
            "lora",
            "small added matrices",
            "tunewell.methods.lora:Lora",
            "LoRA",
            is_adapter=True,
            trains=saved_tables,
            adds=lora_matrices,
            activations=Activations(6, 2, 2, 4, rank=7),
        ),
        MethodEntry(
            "dora",
            "LoRA and a length for each row",
            "tunewell.methods.dora:Dora",
            "DoRA",
            is_adapter=True,
            trains=saved_tables,
            adds=dora_weights,
            activations=Activations(8, 3, 3, 4, rank=7),
        ),
        MethodEntry(
            "full",
            "every weight",
            "tunewell.methods.full:Full",
            "full fine-tuning",
            is_adapter=False,
            learning_rate=2e-5,
            trains=weights_of_layers,
            activations=Activations(8, 2, 2, 4),
        ),
    ],
    group="methods",
    entry_type=MethodEntry,
)


@dataclass(frozen=True)
class OptimizerEntry(Entry):
    """An optimizer, with the properties that are needed without torch."""

    rate_factor: float = 1.0
    """The default learning rate is that of the training method times this factor."""
    rate_reason: str = ""
    """Why the factor is not 1."""
    trains_adapters: bool = True
    runs_on_mps: bool = True
    _: KW_ONLY
    state_bytes: Callable[[Sequence[Shape], int, "Train"], float]
    """The size of its state: `(shapes of the trained weights, bytes of a trained number, settings)`."""
    update_bytes: float
    """Bytes that an update reads and writes for each trained weight: weight, gradient and state."""


_OPTIMIZERS = "tunewell.training.optimizers"
OPTIMIZERS: Registry[OptimizerEntry] = Registry(
    "optimizer",
    [
        OptimizerEntry(
            "adamw",
            "AdamW, with two fp32 moments for each parameter",
            f"{_OPTIMIZERS}.adamw:AdamW",
            state_bytes=adamw_bytes,
            update_bytes=28.0,
        ),
        OptimizerEntry(
            "adamw8bit",
            "AdamW with 8-bit moments, a quarter of the memory",
            f"{_OPTIMIZERS}.adamw8bit:AdamW8bit",
            runs_on_mps=False,
            state_bytes=adamw8bit_bytes,
            update_bytes=20.0,
        ),
        OptimizerEntry(
            "galore",
            "AdamW on gradients projected to a low rank, for full fine-tuning",
            f"{_OPTIMIZERS}.galore:GaLore",
            rate_factor=10.0,
            rate_reason="GaLore's updates are smaller by `train.galore_scale`, and by the root of rank / width",
            trains_adapters=False,
            runs_on_mps=False,
            state_bytes=galore_bytes,
            update_bytes=20.0,
        ),
    ],
    group="optimizers",
    entry_type=OptimizerEntry,
)


NATIVE = "native"
ENGINES: Registry[Entry] = Registry(
    "engine",
    [
        Entry(NATIVE, "tunewell's own", "tunewell.training.engine:train"),
        *(Entry(*entry) for entry in extension_entries("engine")),
    ],
    group="engines",
)


@dataclass(frozen=True)
class FormatEntry(Entry):
    """A row format. `path` is a function `(row, options) -> Conversation`.

    A format with `files` reads whole files: `path` is a function `(file, options)` that yields numbered rows.
    """

    columns: Sequence[str] = ()
    """A row with all these columns has this format. Empty: `data/rows/formats.py` detects it."""
    uses: Sequence[str] = ()
    """Other columns that the format reads. All remaining columns are reported as not used."""
    files: Sequence[str] = ()
    """File types that may contain this format."""
    head: str = ""
    """A regular expression that matches in the first 64 KiB of a file of this format."""


FORMATS: Registry[FormatEntry] = Registry(
    "row format",
    [FormatEntry(name, **entry) for name, entry in read_data(__file__, "formats.toml").items()],
    group="formats",
    entry_type=FormatEntry,
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
    group="targets",
)
"""Export targets in the order in which they are written: a target may use the files of an earlier one."""
GgufFormat = Literal["f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q4_k_m"]
MergedPrecision = Literal["bf16", "fp16", "fp32"]


@dataclass(frozen=True)
class TrackerEntry(Entry):
    """A tracker, with the package that it needs."""

    package: str = ""
    """The name for `pip install`; empty if it needs none."""
    module: str = ""
    """The name for `import`."""


TRACKERS: Registry[TrackerEntry] = Registry(
    "tracker",
    [TrackerEntry(*entry) for entry in extension_entries("tracker")],
    group="trackers",
    entry_type=TrackerEntry,
)


@dataclass(frozen=True)
class TaskEntry(Entry):
    """A task of the rows: its scorer, and the share of right answers that a model must reach."""

    noun: str
    """What is right, in the plural: `labels`."""
    min_right: float | None
    """Share of the questions that must be answered right; None if no answer is right or wrong."""
    because: str
    """The reason for `min_right`."""


_MOST = "a useful model is right more often than wrong"
SCORERS: Registry[TaskEntry] = Registry(
    "task",
    [
        TaskEntry("labels", "one of a few labels", "tunewell.scoring.labels:Labels", "labels", 0.6, _MOST),
        TaskEntry(
            "choice",
            "an option such as yes or B, maybe with a reason",
            "tunewell.scoring.choice:Choice",
            "choices",
            0.5,
            _MOST,
        ),
        TaskEntry("number", "a number as the result", "tunewell.scoring.number:Number", "results", 0.5, _MOST),
        TaskEntry("facts", "short answers to questions", "tunewell.scoring.facts:Facts", "answers", 0.5, _MOST),
        TaskEntry(
            "json",
            "JSON, field by field",
            "tunewell.scoring.structured:Json",
            "objects",
            0.5,
            "all fields of an object must agree",
        ),
        TaskEntry("tools", "tool calls", "tunewell.scoring.structured:Tools", "calls", 0.6, "a wrong call can do harm"),
        TaskEntry(
            "sql",
            "SQL queries",
            "tunewell.scoring.code:Sql",
            "queries",
            0.3,
            "other queries can be right too, so equal ones are a lower bound",
        ),
        TaskEntry(
            "command",
            "shell commands",
            "tunewell.scoring.code:Command",
            "commands",
            0.2,
            "other commands can be right too, so equal ones are a lower bound",
        ),
        TaskEntry(
            "text",
            "free text",
            "tunewell.scoring.free_text:FreeText",
            "answers",
            None,
            "texts can be worded in many ways",
        ),
        TaskEntry(
            "chat",
            "conversations",
            "tunewell.scoring.style:ChatStyle",
            "answers",
            None,
            "there is no right reply in a conversation",
        ),
        TaskEntry(
            "documents",
            "text without questions",
            "tunewell.scoring.free_text:FreeText",
            "answers",
            None,
            "there are no questions",
        ),
    ],
    group="scorers",
    entry_type=TaskEntry,
)
"""The tasks of `verdict.task`."""
