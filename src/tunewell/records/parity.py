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

ExportKind = Literal["adapter", "merged", "gguf", "ollama"]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)


class Artefact(_Record):
    """One thing that was exported."""

    kind: ExportKind
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


class Question(_Record):
    """A question, and what the trained model answers to it, likeliest token by likeliest token."""

    ids: list[int]
    answer: list[int]
    ended: bool
    text: str
    """The answer in letters."""


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
    probes: list[Probe]
    num_positions: int
    """Last positions of each probe whose logits are in `proof.safetensors`."""
    questions: list[Question]
    artefacts: list[Artefact]
    notes: list[str] = Field(default_factory=list)


class Check(_Record):
    """One thing that was compared."""

    name: Literal["files", "finite", "token ids", "logits", "answers", "stop", "template"]
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
        raise UserError(f"`{folder}` is no export: it has no `{PROOF}`", fix="make one with `tunewell export RUN`")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw.get("format_version", 0) > FORMAT_VERSION:
            raise UserError(f"`{path}` was made by a newer tunewell", fix="pip install --upgrade tunewell")
        return Proof.model_validate(with_numbers(raw))
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"`{path}` is damaged", where=str(error).splitlines()[0]) from error
