"""The proof that an export is the model that was trained: `parity.json`, read and written; no logic."""

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tunewell.core.errors import UserError
from tunewell.core.files import stable_json, write_atomic
from tunewell.records.events import plain, with_numbers

FORMAT = "tunewell-parity"
FORMAT_VERSION = 1
PARITY = "parity.json"
PROOF = "proof.json"
REFERENCE = "proof.safetensors"
PROOF_FILES = (REFERENCE, "README.md")
"""What lies beside the artefacts and is hashed as they are."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)


class Artefact(_Record):
    """One thing that was exported."""

    kind: str
    """The name of an export target."""
    precision: str
    """`fp32`, `bf16`, `f16`, `q8_0`, ...; empty for a Modelfile."""
    path: str
    """Seen from the export's folder: a folder, or one file."""
    num_bytes: int
    sha256s: dict[str, str]
    """Of each of its files, seen from the export's folder."""

    @property
    def name(self) -> str:
        return f"{self.kind} {self.precision}".strip()


class Probe(_Record):
    """A conversation, as training renders and tokenises it."""

    messages: list[dict[str, str]]
    text: str
    ids: list[int]
    is_long: bool = False
    """Made to be longer than the model's window, or than what its positions were first trained for."""


class Question(_Record):
    """A question, and what the trained model answers to it, likeliest token by likeliest token."""

    ids: list[int]
    answer: list[int]
    ended: bool
    text: str
    """The answer in letters."""


class ModelFacts(_Record):
    """The trained model's settings, its vocabulary, and the tensors whose sketches are in `proof.safetensors`."""

    config: dict[str, Any]
    """As `config.json` has it, every default filled in."""
    generation: dict[str, Any]
    """As `generation_config.json` has it."""
    special_tokens: dict[str, str]
    """`eos_token`, `pad_token` and so on, as they are spelled."""
    special_ids: dict[str, int]
    """`eos`, `pad` and so on."""
    max_length: int | None
    """Tokens of a text, by the tokenizer's own word."""
    vocabulary: dict[str, str]
    """Hashes of its words and of its merges."""
    shapes: dict[str, list[int]]
    """Of every tensor once merged."""
    twins: dict[str, str]
    """Second names of tensors, with their first."""
    license: str | None = None
    """Of the base, as a Modelfile names it."""


class Proof(_Record):
    """What an export is held against: how the trained model reads, computes and answers."""

    format: str = "tunewell-proof"
    format_version: int = FORMAT_VERSION
    made_by: str
    subject: str
    base: str | None
    is_lora: bool
    stop_ids: list[int]
    bos_id: int | None = None
    added_tokens: list[str] = Field(default_factory=list)
    """Of the template, which the base does not know: its tables are lengthened for them before an adapter is put on."""
    date: str | None = None
    """The day that training saw where the template asks for today's, at which the clock of the proof stands still;
    None where it does not ask."""
    probes: list[Probe]
    num_positions: int
    """Last positions of each probe whose logits are in `proof.safetensors`."""
    questions: list[Question]
    model: ModelFacts | None = None
    """None in exports of tunewell before these were kept: nothing of the kind is compared then."""
    artefacts: list[Artefact]
    sha256s: dict[str, str] = Field(default_factory=dict)
    """Of the files that belong to no artefact."""
    notes: list[str] = Field(default_factory=list)


class Check(_Record):
    """One thing that was compared."""

    name: Literal["files", "finite", "token ids", "logits", "answers", "stop", "template", "tensors", "settings"]
    is_ok: bool
    words: str
    figures: dict[str, Any] = Field(default_factory=dict)
    bound: str = ""
    """What is allowed, and why."""


class Link(_Record):
    """One artefact held against what was trained."""

    artefact: str
    path: str
    checks: list[Check]

    @property
    def is_ok(self) -> bool:
        return all(check.is_ok for check in self.checks)


class Parity(_Record):
    """The whole chain."""

    format: str = FORMAT
    format_version: int = FORMAT_VERSION
    made_by: str
    made_at: str
    subject: str
    links: list[Link]
    versions: dict[str, str] = Field(default_factory=dict)
    is_ok: bool


def write_record(path: Path, record: Parity | Proof) -> None:
    """Write a record in one move, without secrets."""
    write_atomic(path, stable_json(plain(record.model_dump())))


def read_proof(folder: Path) -> Proof:
    """Read what an export is to be held against; raise UserError where the folder is no export of ours."""
    path = folder / PROOF
    if not path.is_file():
        raise UserError(f"`{folder}` is not an export: it has no `{PROOF}`", fix="run `tunewell export RUN`")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw.get("format_version", 0) > FORMAT_VERSION:
            raise UserError(f"`{path}` was made by a newer tunewell", fix="pip install --upgrade tunewell")
        return Proof.model_validate(with_numbers(raw))
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"`{path}` is damaged", where=str(error).splitlines()[0]) from error
