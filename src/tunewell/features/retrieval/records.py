"""`index.json`: the passages of a document index, how they were embedded, and how they are searched."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from tunewell.core.errors import UserError
from tunewell.core.files import parse_json, read_bytes, sha256_text, stable_json, write_atomic
from tunewell.records.base import DamagedRecord, FileRecord, Record, parse_record
from tunewell.records.plan import Chosen

INDEX = "index.json"
_HASH = "sha256"


class DamagedIndex(UserError):
    """Raised for an index whose content is incomplete or has changed. It can be created again."""

    def __init__(self, address: str, detail: str, arguments: Sequence[str] = ()) -> None:
        fix = f"create it again with `{rebuild_command(address, arguments)}`"
        super().__init__(f"the index `{address}` is damaged", where=detail, fix=fix)


def rebuild_command(address: str, arguments: Sequence[str]) -> str:
    """Return the command that creates an index again; without `arguments`, the user has to name the documents."""
    return shlex.join(["tunewell", "index", *(arguments or ["DOCUMENTS"]), "--out", address])


class EmbedderRecord(Record):
    """The embedder of an index. Vectors of different embedders cannot be compared."""

    name: str
    sha256: str
    dimension: int
    max_tokens: int


class SearchSettings(Record):
    """How an index is searched."""

    vector_weight: Chosen[float]
    """Weight of the vector search in the score of a passage; the word search has the rest."""
    num_passages: Chosen[int]
    """Number of passages that a model gets to read."""
    refusal: Chosen[list[float]]
    """Coefficients of the score below which a question counts as not answered by the documents."""
    questions: str | None = None
    """The file with the questions on which the settings were chosen; None if they are the defaults."""


class DocumentCounts(Record):
    """What became of the files and the passages: files = indexed + skipped, cut = kept + duplicates."""

    files: int = 0
    indexed: int = 0
    skipped: dict[str, int] = Field(default_factory=dict[str, int])
    examples: dict[str, str] = Field(default_factory=dict[str, str])
    passages: int = 0
    duplicates: int = 0
    embedded: int = 0
    """Number of passages that were embedded; the other vectors were in the old index."""


class IndexManifest(Record):
    """The manifest of an index. It is written last: an index without it is incomplete."""

    format_version: int = 1
    made_by: str
    created: str
    embedder: EmbedderRecord
    language: Chosen[str]
    counts: DocumentCounts
    settings: SearchSettings
    generation: str = ""
    """The folder with the data of this index."""
    files: dict[str, FileRecord] = Field(default_factory=dict[str, FileRecord])
    documents_sha256: str = ""
    """Hash of the names and contents of all documents."""
    seconds: float | None = None
    """Time to read and embed the documents, updates included; None if unknown."""
    arguments: list[str] = Field(default_factory=list[str])
    """The arguments of `tunewell index`, without `--out`."""

    @property
    def has_hashes(self) -> bool:
        """Return False for an index of an earlier version, whose content cannot be verified."""
        return all(record.sha256 for record in self.files.values())


def read_index(folder: Path) -> IndexManifest:
    """Read the manifest of an index; raise UserError if there is none or it is damaged."""
    if not (folder / INDEX).is_file():
        raise UserError(
            f"there is no index in `{folder}`", fix=f"create it with `tunewell index DOCUMENTS --out {folder}`"
        )
    data = read_bytes(folder / INDEX)
    try:
        manifest, record = parse_record(data, IndexManifest, str(folder / INDEX)), parse_json(data)
    except DamagedRecord as error:
        raise DamagedIndex(str(folder), f"{INDEX}: {error.where}") from error
    expected = record.pop(_HASH, None)
    if any(file.sha256 for file in manifest.files.values()) and expected != sha256_text(stable_json(record)):
        raise DamagedIndex(str(folder), f"{INDEX} has changed since it was written")
    return manifest


def write_index(folder: Path, manifest: IndexManifest) -> None:
    """Write the manifest atomically, with a hash of its other entries."""
    record = manifest.model_dump(mode="json")
    write_atomic(folder / INDEX, stable_json(record | {_HASH: sha256_text(stable_json(record))}))
