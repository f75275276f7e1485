"""`proof.json` and `parity.json`: the reference for verifying an export, and the result of the verification."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from tunewell.core.errors import UserError
from tunewell.core.files import stable_json, write_atomic
from tunewell.records.base import Record, read_record
from tunewell.records.base_model import BaseContent
from tunewell.records.events import plain, with_numbers
from tunewell.records.plan import QuantizedBase

FORMAT = "tunewell-parity"
PARITY = "parity.json"
PROOF = "proof.json"
REFERENCE = "proof.safetensors"
PROOF_FILES = (REFERENCE, "README.md")
"""Other files in the export folder that are also hashed."""
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
    """Hashes of the files of the artefact, by path relative to the export folder."""

    @property
    def name(self) -> str:
        return f"{self.kind} {self.precision}".strip()


class ProofProbe(Record):
    """A test conversation, rendered and tokenized as in training."""

    messages: list[dict[str, str]]
    text: str
    ids: list[int]
    whole_ids: list[int] | None = None
    """The ids of the whole text encoded at once, if they differ: replies in the history start with a new token."""
    is_long: bool = False
    """Whether this is the long probe, which is meant to exceed the sliding window or original context length."""


class ProofQuestion(Record):
    """A question and the greedy answer of the trained model."""

    ids: list[int]
    answer: list[int]
    ended: bool
    text: str
    """The text of the answer."""


class PlainText(Record):
    """A text and its token ids, with the tokens that the tokenizer adds."""

    text: str
    ids: list[int]


class TrainedFacts(Record):
    """Settings, vocabulary and tensor shapes of the trained model. The tensor sketches are in `proof.safetensors`."""

    config: _Settings
    """The values of `config.json`, with all defaults."""
    generation: _Settings
    """The values of `generation_config.json`."""
    special_tokens: dict[str, str]
    """Texts of the special tokens: `eos_token`, `pad_token` and others."""
    special_ids: dict[str, int]
    """Ids of the special tokens: `eos`, `pad` and others."""
    max_length: int | None
    """Maximum length of a text in tokens, according to the tokenizer."""
    vocabulary: dict[str, str]
    """Hashes of the tokens and the merges of the vocabulary."""
    tokenizer: dict[str, str] = {}
    """Hashes of the parts of `tokenizer.json`."""
    template_sha256: str | None = None
    """Hash of the exported chat template."""
    plain_texts: list[PlainText] = []
    """Texts that are tokenized without a chat template."""
    shapes: dict[str, list[int]]
    """Shape of every tensor after merging."""
    twins: dict[str, str]
    """Tied tensors: the second name -> the first name."""
    license: str | None = None
    """License of the base model, as in a Modelfile."""


class Proof(Record):
    """The reference for verifying an export: token ids, settings and answers of the trained model."""

    format: str = "tunewell-proof"
    format_version: int = 1
    made_by: str
    subject: str
    base: str | None
    is_lora: bool
    trained_on: BaseContent | None = None
    """The content of an adapter's base model; None in exports of earlier versions."""
    quantized: QuantizedBase | None = None
    """How the base model was quantised in training, if the adapter belongs to the dequantised weights."""
    trained_precision: str = "fp32"
    """The precision to which a quantised base model was dequantised in training."""
    stop_ids: list[int]
    bos_id: int | None = None
    added_tokens: list[str] = []
    """Template tokens missing in the base model. Its embeddings are extended before the adapter is applied."""
    date: str | None = None
    """The fixed date for a template that uses the current date, or None if the template does not."""
    probes: list[ProofProbe]
    num_positions: int
    """Number of final positions of each probe for which `proof.safetensors` contains the logits."""
    questions: list[ProofQuestion]
    other_ids_share: float | None = None
    """Share of the training conversations with other ids if their whole text is encoded at once, if it is known."""
    model: TrainedFacts
    artefacts: list[Artefact]
    sha256s: dict[str, str] = {}
    """Hashes of the files that are not part of an artefact."""
    notes: list[str] = []


class Check(Record):
    """One comparison."""

    name: Literal[
        "files", "base", "finite", "token ids", "logits", "answers", "stop", "template", "tensors", "settings"
    ]
    is_ok: bool
    is_warning: bool = False
    """Whether the screen shows a warning, although the artefact matches the trained model."""
    words: str
    figures: dict[str, Any] = {}
    bound: str = ""
    """The allowed difference and the reason for it."""


class Link(Record):
    """The comparison of one artefact with the trained model."""

    artefact: str
    path: str
    checks: list[Check]

    @property
    def is_ok(self) -> bool:
        return all(check.is_ok for check in self.checks)


class Parity(Record):
    """The verification result for all artefacts."""

    format: str = FORMAT
    format_version: int = 1
    made_by: str
    made_at: str
    subject: str
    links: list[Link]
    other_ids_share: float | None = None
    """As in `proof.json`. llama.cpp, Ollama and transformers encode the whole text at once."""
    versions: dict[str, str] = {}
    is_ok: bool


def write_record(path: Path, record: Parity | Proof) -> None:
    """Write a record atomically, without secrets."""
    write_atomic(path, stable_json(plain(record.model_dump())))


def read_proof(folder: Path) -> Proof:
    """Read the reference of an export; raise UserError if the folder is not a tunewell export."""
    path = folder / PROOF
    if not path.is_file():
        raise UserError(f"`{folder}` is not an export: `{PROOF}` is missing", fix="run `tunewell export RUN`")
    return read_record(path, Proof)
