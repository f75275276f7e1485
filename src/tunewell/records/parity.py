"""`parity.json` and `proof.json`: the proof that an export equals the trained model."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from tunewell.core.errors import UserError
from tunewell.core.files import stable_json, write_atomic
from tunewell.records.base import Record, read_record
from tunewell.records.events import plain, with_numbers

FORMAT = "tunewell-parity"
PARITY = "parity.json"
PROOF = "proof.json"
REFERENCE = "proof.safetensors"
PROOF_FILES = (REFERENCE, "README.md")
"""Files beside the artefacts that are hashed too."""
_Settings = Annotated[dict[str, Any], BeforeValidator(with_numbers)]


class Artefact(Record):
    """One exported artefact."""

    kind: str
    """The name of an export target."""
    precision: str
    """`fp32`, `bf16`, `f16`, `q8_0`, ...; empty for a Modelfile."""
    path: str
    """A folder or a file, relative to the export folder."""
    num_bytes: int
    sha256s: dict[str, str]
    """Hash of each of its files, by path relative to the export folder."""

    @property
    def name(self) -> str:
        return f"{self.kind} {self.precision}".strip()


class Probe(Record):
    """A conversation as the training renders and tokenizes it."""

    messages: list[dict[str, str]]
    text: str
    ids: list[int]
    is_long: bool = False
    """Longer than the sliding window of the model, or than the context it was first trained for."""


class Question(Record):
    """A question and the greedy answer of the trained model."""

    ids: list[int]
    answer: list[int]
    ended: bool
    text: str
    """The text of the answer."""


class ModelFacts(Record):
    """Settings and vocabulary of the trained model, and the tensors whose sketches are in `proof.safetensors`."""

    config: _Settings
    """The values of `config.json`, with all defaults."""
    generation: _Settings
    """The values of `generation_config.json`."""
    special_tokens: dict[str, str]
    """Text of `eos_token`, `pad_token` and so on."""
    special_ids: dict[str, int]
    """Ids of `eos`, `pad` and so on."""
    max_length: int | None
    """Texts with their tokens, according to the tokenizer."""
    vocabulary: dict[str, str]
    """Hashes of its tokens and of its merges."""
    shapes: dict[str, list[int]]
    """Shape of every tensor after merging."""
    twins: dict[str, str]
    """Tied tensors: second name to first name."""
    license: str | None = None
    """License of the base model, as in a Modelfile."""


class Proof(Record):
    """The reference of an export: how the trained model tokenizes, computes and answers."""

    format: str = "tunewell-proof"
    format_version: int = 1
    made_by: str
    subject: str
    base: str | None
    is_lora: bool
    stop_ids: list[int]
    bos_id: int | None = None
    added_tokens: list[str] = Field(default_factory=list)
    """Tokens of the template that the base does not have; its embeddings are extended before the adapter is applied."""
    date: str | None = None
    """The fixed date for a template that asks for today's date; None if it does not ask."""
    probes: list[Probe]
    num_positions: int
    """Number of last positions of each probe whose logits are in `proof.safetensors`."""
    questions: list[Question]
    model: ModelFacts | None = None
    """None in exports of older versions; then this part is not compared."""
    artefacts: list[Artefact]
    sha256s: dict[str, str] = Field(default_factory=dict)
    """Hashes of the files that belong to no artefact."""
    notes: list[str] = Field(default_factory=list)


class Check(Record):
    """One comparison."""

    name: Literal["files", "finite", "token ids", "logits", "answers", "stop", "template", "tensors", "settings"]
    is_ok: bool
    words: str
    figures: dict[str, Any] = Field(default_factory=dict)
    bound: str = ""
    """The allowed difference, and why."""


class Link(Record):
    """The comparison of one artefact with the trained model."""

    artefact: str
    path: str
    checks: list[Check]

    @property
    def is_ok(self) -> bool:
        return all(check.is_ok for check in self.checks)


class Parity(Record):
    """The result for all artefacts."""

    format: str = FORMAT
    format_version: int = 1
    made_by: str
    made_at: str
    subject: str
    links: list[Link]
    versions: dict[str, str] = Field(default_factory=dict)
    is_ok: bool


def write_record(path: Path, record: Parity | Proof) -> None:
    """Write a record atomically, without secrets."""
    write_atomic(path, stable_json(plain(record.model_dump())))


def read_proof(folder: Path) -> Proof:
    """Read the reference of an export; raise UserError if the folder is not an export of tunewell."""
    path = folder / PROOF
    if not path.is_file():
        raise UserError(f"`{folder}` is not an export: it has no `{PROOF}`", fix="run `tunewell export RUN`")
    return read_record(path, Proof)
