"""Read and write `manifest.json`, the description of a corpus."""

from pathlib import Path
from typing import Any, cast

from tunewell.config.glossary import explain_losses
from tunewell.core.errors import UserError
from tunewell.core.files import parse_json, read_text, sha256_text, stable_json, write_atomic
from tunewell.core.units import count, percent
from tunewell.records.base import FileRecord, Record, require_known_version

FORMAT = "tunewell-corpus"
FORMAT_VERSION = 1
COLUMNS = ("input_ids", "labels", "seq_lengths")
"""The columns of the Arrow files in a corpus."""
MANIFEST = "manifest.json"
_HASH = "sha256"
NEAR_DUPLICATES = "near_duplicates.jsonl"
SECRETS = "secrets.jsonl"
DROPPED = "dropped.jsonl"
ANSWERS = "answers.jsonl"
DIGESTS = "digests.npy"
"""Digests of the conversation and of the question of each document in a split, and its boundary tokens: five unsigned
64-bit integers. A corpus of an older version has none."""
QUESTIONS = "held_out/questions.bin"
"""Hashes of the questions that `data.held_out: auto` holds out, as sorted little-endian 64-bit integers."""
MIN_TO_JUDGE = 5
"""Minimum number of held-out rows for a verdict: a model that is no better than its base is better on all of four rows
in 1 of 16 cases, on all of five in 1 of 32 (sign test at 5%)."""
CORPUS_NAMES = frozenset(
    {MANIFEST, NEAR_DUPLICATES, SECRETS, "README.md", "dataset_dict.json", DROPPED, ANSWERS, "held_out"}
    | {"tokenizer", "train", "selection"}
)
"""All names in a corpus folder."""


class DamagedManifest(UserError):
    """Raised for a manifest that is truncated or invalid."""


class SourceRecord(Record):
    """One source file and the counts of its rows."""

    name: str
    sha256: str
    """Empty for a remote file that was not downloaded, because earlier files had all rows of the limit."""
    bytes: int
    rows: int
    documents: int
    held_out: int
    selected: int = 0
    dropped: dict[str, int]
    formats: dict[str, int]
    unused: dict[str, int] = {}
    """Number of documents by column that is not used."""
    version: str = ""
    """Version of a remote file: its ETag, or the commit of a dataset of the hub."""


class TokenCounts(Record):
    """Tokens of the training sequences; `total` is the sum of the other three."""

    total: int
    supervised: int
    context: int
    padding: int


class PackingRecord(Record):
    """The number of sequences and how full they are."""

    context_length: int
    because: str
    sequences: int
    efficiency: float
    documents_per_sequence: float


class LengthRecord(Record):
    """Lengths of the training documents in tokens."""

    mean: float
    median: float
    p95: float
    p99: float
    max: int
    padding_waste: float
    """Share of padding tokens if every document were padded to the context length."""
    histogram: list[tuple[int, int, int]]
    """(from, to, documents): from is included, to is not."""


class ShardRecord(Record):
    """One file of packed sequences."""

    file: str
    bytes: int
    sha256: str
    sequences: int


class SplitRecord(Record):
    """One split and its shards. `documents` includes pieces and repeats."""

    documents: int
    sequences: int
    tokens: int
    supervised: int
    shards: list[ShardRecord]


_NUM_NAMED = 10


class TokenizerRecord(Record):
    """The tokenizer that produced the token ids."""

    source: str
    kind: str
    sha256: str
    vocab_size: int
    special_tokens: dict[str, str]
    added_by_us: list[str]
    normalizer: str = ""
    """The steps that change text before it is split into tokens; empty if there are none or they are not known."""


class TemplateRecord(Record):
    """The template that rendered the conversations, and which turns are supervised."""

    name: str
    sha256: str
    learn_from: str
    learn_roles: list[str]
    date: str | None = None
    """The date passed to the template, if the template uses the current date."""
    end_of_turn: str = ""


class NearPair(Record):
    """One line of `near_duplicates.jsonl`: a training row and the row to which it is similar."""

    kind: str
    """`near_duplicate`: the other row is a training row; `near_held_out`: it is held out."""
    source: str
    row: int
    similar_source: str
    similar_row: int
    similarity: float


class DroppedRow(Record):
    """One line of `dropped.jsonl`: a row that is not used, and the reason."""

    source: str
    row: int
    reason: str
    detail: str = ""


class SecretRow(Record):
    """One line of `secrets.jsonl`: a row with secrets, and their number by kind."""

    source: str
    row: int
    kinds: dict[str, int]


class AnswerRow(Record):
    """One line of `answers.jsonl`: a row with accepted answers, and the column that has them."""

    source: str
    row: int
    column: str
    answers: list[str]


class NearDuplicateRecord(Record):
    """The search for near duplicates. A number is None if the search was off."""

    threshold: float
    """Minimum Jaccard similarity of the shingles of two documents."""
    shingle_tokens: int
    near_held_out: str
    """What was done with training rows that are similar to a held-out row: `warn`, `drop` or `keep`."""
    near_duplicate: str
    num_near_held_out: int | None = None
    num_near_duplicates: int | None = None


class SecretRecord(Record):
    """Secrets and personal data in the rows."""

    action: str
    """What was done: `warn`, `redact` or `drop`."""
    rows: int
    kinds: dict[str, int]
    """Number of secrets by kind."""


class RowsRecord(Record):
    """The facts about the rows from which settings are recommended: those of the files, with held-out rows."""

    num_rows: int
    mean_tokens: float
    """Of the first rows, as they are before duplicates are dropped and long ones are cut: `init` sees the same."""
    mean_supervised: float
    task: str
    because: str


class Manifest(Record):
    """The description of a corpus; it is written last, so its presence means that the corpus is complete."""

    format: str = FORMAT
    format_version: int = FORMAT_VERSION
    made_by: str
    inputs_sha256: str
    """Hash of rows, settings, tokenizer and template. If it is unchanged, `prepare` does not rebuild the corpus."""
    corpus_sha256: str
    """Hash of all shards. The training order depends on it."""
    rows_read: int
    rows_in: int
    documents: int
    held_out: int
    rows: RowsRecord | None = None
    """None in a corpus of an earlier version."""
    selected: int = 0
    """Training rows that were taken out for choosing checkpoints: the selection slice."""
    selected_because: str = ""
    """The reason for their number; empty in a corpus of an older version."""
    questions: int | None = None
    """Distinct questions of all documents that are used; None in a corpus of 0.1.0."""
    pieces: int
    repeats: int
    dropped: dict[str, int]
    notes: dict[str, int]
    near_duplicates: NearDuplicateRecord | None = None
    secrets: SecretRecord | None = None
    boundary_tokens: int
    unknown_characters: dict[str, int] = {}
    """The most frequent characters that the vocabulary lacks, counted in a part of the rows."""
    encoding_version: int = 1
    """Version of the encoding; since version 2, every reply starts with a new token."""
    tokens: TokenCounts
    packing: PackingRecord
    lengths: LengthRecord
    sources: list[SourceRecord]
    mix: list[str] = []
    remarks: list[str] = []
    """Sentences about the sources: columns that are not used, files that are not read, how texts are split."""
    tokenizer: TokenizerRecord
    templates: list[TemplateRecord]
    warnings: list[str] = []
    config: dict[str, Any]
    splits: dict[str, SplitRecord]
    files: dict[str, FileRecord]
    """All other files of the corpus."""

    @property
    def unknown_remark(self) -> str:
        """The characters that the vocabulary lacks, and the normalizer."""
        return unknown_remark(self.unknown_characters, self.tokenizer.normalizer)

    @property
    def other_ids_share(self) -> float | None:
        """Share of rows with other ids if their whole text is encoded at once; None if it was not counted."""
        later = ("exact_duplicate", "answer_in_held_out", "near_held_out", "near_duplicate", "not_sampled", "too_long")
        num_dropped = sum(self.dropped.get(reason, 0) for reason in later)
        num_encoded = self.documents + self.selected + self.held_out + num_dropped
        if self.encoding_version < 2 or not num_encoded:
            return None
        return self.notes.get("other_ids_as_a_whole", 0) / num_encoded

    @property
    def too_few_to_judge(self) -> str | None:
        """A sentence, if so few rows are held out that every verdict will be UNPROVEN, or None."""
        num_rows = self.documents + self.selected + self.held_out
        return too_few_to_judge(self.held_out, num_rows, self.questions)

    @property
    def evaluated(self) -> SplitRecord | None:
        """The rows that are evaluated during training: the selection slice, else the held-out rows."""
        return self.splits.get("selection") or self.splits.get("held_out")

    def cautions(self) -> list[str]:
        """Return what a user should know before training: rows that are dropped, not used, unsafe or too similar."""
        found = [*self.warnings, *self.remarks, *([self.too_few_to_judge] if self.too_few_to_judge else [])]
        if self.dropped:
            reasons = ", ".join(f"{count(number)} {reason}" for reason, number in self.dropped.items())
            total = f"{count(sum(self.dropped.values()))} of {count(self.rows_in, 'row')}"
            found.append(f"{total} dropped: {reasons}; listed in `dropped.jsonl` of the corpus")
            found += explain_losses(self.dropped, self.rows_in)
        if number := self.notes.get("unknown_tokens"):
            found.append(f"{count(number, 'unknown token')}: {self.unknown_remark}")
        near = self.near_duplicates
        if near and near.near_held_out == "warn" and near.num_near_held_out:
            found.append(
                f"{count(near.num_near_held_out, 'training row')} at least {percent(near.threshold, 0)} similar to a "
                "held-out row: scores may be too good; `data.clean.near_held_out: drop` drops such rows"
            )
        if self.secrets and self.secrets.action == "warn" and self.secrets.rows:
            kinds = ", ".join(f"{count(number)} {kind}" for kind, number in self.secrets.kinds.items())
            found.append(
                f"{count(self.secrets.rows, 'row')} with secrets or personal data, which a model may repeat: {kinds}; "
                "`data.clean.secrets: redact` replaces them"
            )
        return found


def too_few_to_judge(num_held_out: int, num_rows: int, num_questions: int | None = None) -> str | None:
    """Return a sentence with a remedy if a verdict will be UNPROVEN, because too few rows are held out, or None."""
    if num_held_out >= MIN_TO_JUDGE:
        return None
    needed, known = 4 * MIN_TO_JUDGE, num_rows if num_questions is None else num_questions
    remedy = f"add {count(needed - known, 'row')} with other questions" if known < needed else "set it to `auto`"
    rows = "no row is" if not num_held_out else "1 row is" if num_held_out == 1 else f"{num_held_out} rows are"
    return (
        f"{rows} held out (`data.held_out`), and a verdict needs {MIN_TO_JUDGE}: it will be UNPROVEN; {remedy}, or "
        "name a file of test rows there"
    )


def unknown_remark(characters: dict[str, int], normalizer: str) -> str:
    """Return the characters that a vocabulary lacks, most frequent first, and the normalizer that keeps them."""
    ordered = sorted(characters, key=lambda character: (-characters[character], character))
    named = ", ".join(f"{character!r}" for character in ordered[:_NUM_NAMED])
    steps = f"its normalizer ({normalizer}) does not replace them" if normalizer else "it has no normalizer"
    return f"the vocabulary lacks {named}{', ...' if len(ordered) > _NUM_NAMED else ''}; {steps}"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest atomically, with a hash of its other entries."""
    record = manifest.model_dump(mode="json")
    write_atomic(folder / MANIFEST, stable_json(record | {_HASH: sha256_text(stable_json(record))}))


def _check_hash(record: dict[str, Any]) -> None:
    """Raise ValueError if the record differs from its hash."""
    if record.pop(_HASH, None) != sha256_text(stable_json(record)):
        raise ValueError("its content does not match its hash")


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a corpus; raise UserError if it is missing, DamagedManifest if it is damaged."""
    path = folder / MANIFEST
    if not path.is_file():
        what = f"`{folder}` is not a finished corpus" if folder.is_dir() else f"there is no corpus `{folder}`"
        raise UserError(what, where=f"expected `{path}`", fix="run `tunewell prepare`")
    try:
        raw = parse_json(read_text(path))
        record = cast(dict[str, Any], raw) if isinstance(raw, dict) else {}
        is_ours = record.get("format") == FORMAT
        if is_ours:
            require_known_version(record, Manifest, str(folder))
            _check_hash(record)
            return Manifest.model_validate(record)
    except (ValueError, TypeError) as error:
        raise DamagedManifest(
            f"the manifest of `{folder}` is damaged",
            where=f"{path}: {str(error).splitlines()[0]}",
            fix="run `tunewell prepare` again; it rebuilds the corpus",
        ) from error
    raise UserError(f"`{path}` is not a tunewell manifest", fix="give the output folder of `tunewell prepare`")
