"""Open a corpus and read its documents, or its packed sequences as a Hugging Face dataset."""

import copy
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, SupportsIndex, TypeVar

import numpy as np
import numpy.typing as npt

from tunewell.core.arrays import Hashes, Ints, SmallInts
from tunewell.core.cache import sha256_once
from tunewell.core.errors import UserError
from tunewell.core.files import open_file, sha256_text
from tunewell.core.optional import import_optional
from tunewell.data.sources.arrow import Lists, read_columns, read_lists
from tunewell.records.base import Record
from tunewell.records.manifest import (
    ANSWERS,
    COLUMNS,
    DIGESTS,
    DROPPED,
    MANIFEST,
    NEAR_DUPLICATES,
    SECRETS,
    AnswerRow,
    DroppedRow,
    Manifest,
    NearPair,
    SecretRow,
    SplitRecord,
    read_manifest,
)

T = TypeVar("T")
R = TypeVar("R", bound=Record)
Ids = SmallInts


@dataclass(frozen=True, slots=True)
class Document:
    """One document. `labels` is -100 for tokens that are not supervised. Fields can also be read by name."""

    input_ids: list[int]
    labels: list[int]
    source: str
    row: int

    def __getitem__(self, name: str) -> Any:
        if name not in self.keys():
            raise KeyError(name)
        return getattr(self, name)

    def keys(self) -> tuple[str, ...]:
        return ("input_ids", "labels", "source", "row")


class Split:
    """The documents of one split, memory-mapped."""

    def __init__(self, folder: Path, record: SplitRecord | None, sources: list[str], check: Callable[[], None]) -> None:
        self.folder = folder
        self._record = record
        self._sources = sources
        self._check = check
        self._is_in_memory = False

    def __len__(self) -> int:
        return self._record.documents if self._record else 0

    def __iter__(self) -> Iterator[Document]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: SupportsIndex) -> Document:
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"document {number} does not exist: the split has {len(self)} documents")
        number %= len(self)
        ids, labels = self.arrays(number)
        source = self._sources[int(self.index["source"][number])]
        return Document(ids.tolist(), labels.tolist(), source, int(self.index["row"][number]))

    def arrays(self, index: int) -> tuple[Ids, Ids]:
        """Return the ids and labels of a document as views of the mapped shard, without copying."""
        firsts, batches = self._batches
        sequence = int(self.index["sequence"][index])
        number = int(np.searchsorted(firsts, sequence, side="right")) - 1
        (offsets, ids), (_, labels) = batches[number]["input_ids"], batches[number]["labels"]
        begin = int(offsets[sequence - firsts[number]]) + int(self.index["start"][index])
        end = begin + int(self.index["length"][index])
        return ids[begin:end], labels[begin:end]

    @cached_property
    def index(self) -> dict[str, npt.NDArray[Any]]:
        """Return the columns of the index: source, row, sequence, start, length, supervised, piece_start."""
        if self._record is None:
            return {}
        return self._read(read_columns, "documents.arrow")

    @cached_property
    def digests(self) -> Hashes:
        """Return the digests of every document (see `DIGESTS`)."""
        return self._read(_read_digests, DIGESTS)

    @cached_property
    def _batches(self) -> tuple[Ints, list[dict[str, Lists]]]:
        """Return the batches of all shards, and the number of the first sequence in each."""
        shards = self._record.shards if self._record else []
        batches = [batch for shard in shards for batch in self._read(read_lists, shard.file)]
        sizes = np.asarray([len(batch["input_ids"][0]) - 1 for batch in batches], dtype=np.int64)
        return np.cumsum(sizes) - sizes, batches

    def _read(self, read: Callable[..., T], name: str) -> T:
        self._check()
        try:
            return read(self.folder / name, in_memory=self._is_in_memory)
        except (OSError, ValueError) as error:  # including `pyarrow.ArrowInvalid`
            raise _damaged(self.folder / name) from error

    def select(self, chosen: Ints) -> "Split":
        """Return a split with only these documents, in this order."""
        split = copy.copy(self)
        split._record = self._record and self._record.model_copy(update={"documents": len(chosen)})
        split.__dict__["index"] = {name: column[chosen] for name, column in self.index.items()}
        return split

    def as_dataset(self, *, padded: bool = False) -> Any:
        """Return the packed sequences as a `datasets.Dataset` with `input_ids`, `labels`, `seq_lengths`.

        With `padded=True`, return one document per row, padded to the longest, with `input_ids`, `attention_mask` and
        `labels`. Every trainer can use such rows, for example `transformers.Trainer` with `default_data_collator`.
        """
        datasets = import_optional("datasets", extra="datasets", purpose="opening a corpus as a dataset")
        kinds, length = dict.fromkeys(COLUMNS, "int32"), -1
        if padded:
            kinds, length = _PADDED_COLUMNS, int(self.index["length"].max()) if len(self) else 0
        lists = {name: datasets.List(datasets.Value(kind), length=length) for name, kind in kinds.items()}
        features = datasets.Features(lists)
        if self._record is None or not len(self):
            return datasets.Dataset.from_dict({name: [] for name in kinds}, features=features)
        if not padded:
            self._check()
            return datasets.load_from_disk(str(self.folder), keep_in_memory=self._is_in_memory)
        # `datasets` writes the rows to its cache on disk, under a hash of these arguments, and memory-maps them.
        version = sha256_text(*(shard.sha256 for shard in self._record.shards))
        arguments = {"folder": str(self.folder.absolute()), "length": length, "version": version}
        return datasets.Dataset.from_generator(_padded_rows, gen_kwargs=arguments, features=features)

    def find(self, source: str, row: int) -> int | None:
        """Return the index of the first document of a row, or None if the row is not in this split."""
        if self._record is None or source not in self._sources:
            return None
        is_row = (self.index["source"] == self._sources.index(source)) & (self.index["row"] == row)
        return int(np.argmax(is_row)) if is_row.any() else None

    def load_in_memory(self) -> None:
        """Read all files into memory, for disks on which memory-mapping is slow, like Windows drives under WSL."""
        self._is_in_memory = True
        for name in ("index", "_batches"):
            self.__dict__.pop(name, None)
            getattr(self, name)


_PADDED_COLUMNS = {"input_ids": "int32", "attention_mask": "int8", "labels": "int32"}


def _padded_rows(folder: str, length: int, version: str) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Yield each document of a split with padding at its end: id 0, attention 0, label -100."""
    corpus = open_corpus(Path(folder).parent)
    split: Split = getattr(corpus, Path(folder).name, corpus)
    for index in range(len(split)):
        ids, labels = split.arrays(index)
        rest = (0, length - len(ids))
        yield {
            "input_ids": np.pad(ids, rest),
            "attention_mask": np.pad(np.ones(len(ids), dtype=np.int8), rest),
            "labels": np.pad(labels, rest, constant_values=-100),
        }


class Corpus(Split):
    """A corpus: its training documents, the splits `selection` and `held_out`, and the manifest."""

    def __init__(self, folder: Path) -> None:
        stamp = _stamp(folder)
        self.path = folder
        self.manifest: Manifest = read_manifest(folder)

        def check() -> None:
            if _stamp(folder) != stamp:
                raise UserError(f"the corpus `{folder}` was replaced while it was open", fix="open it again")

        sources = [source.name for source in self.manifest.sources]
        super().__init__(folder / "train", self.manifest.splits.get("train"), sources, check)
        self.selection = Split(folder / "selection", self.manifest.splits.get("selection"), sources, check)
        """Rows taken out of the training rows, on which checkpoints are chosen."""
        self.held_out = Split(folder / "held_out", self.manifest.splits.get("held_out"), sources, check)

    @property
    def evaluated(self) -> Split:
        """The rows that are evaluated during training: the selection slice, else the held-out rows."""
        return self.selection if len(self.selection) else self.held_out

    def near_pairs(self) -> list[NearPair]:
        """Return the near duplicates that `prepare` listed, at most 1,000 of each kind."""
        return list(self._records(NEAR_DUPLICATES, NearPair))

    def secret_rows(self) -> list[SecretRow]:
        """Return the rows with secrets that `prepare` listed, at most 1,000."""
        return list(self._records(SECRETS, SecretRow))

    def dropped_rows(self) -> Iterator[DroppedRow]:
        """Yield every dropped row with its reason."""
        return self._records(DROPPED, DroppedRow)

    def answer_rows(self) -> Iterator[AnswerRow]:
        """Yield every row with accepted answers (`answers` or `value`)."""
        return self._records(ANSWERS, AnswerRow)

    def _records(self, name: str, kind: type[R]) -> Iterator[R]:
        if name in self.manifest.files:
            with open_file(self.path / name, "r", encoding="utf-8") as lines:
                for line in lines:
                    yield kind.model_validate_json(line)

    def verify(self) -> None:
        """Compare the hash of every file with the manifest; raise UserError for the first difference."""
        self.check_sizes()
        for name, record in self.manifest.files.items():
            if sha256_once(self.path / name) != record.sha256:
                raise _damaged(self.path / name)

    def check_sizes(self) -> None:
        """Raise UserError for the first file that is missing or whose size differs from the manifest."""
        for name, record in self.manifest.files.items():
            path = self.path / name
            if not path.is_file() or path.stat().st_size != record.bytes:
                raise _damaged(path)


def open_corpus(path: str | Path, *, verify: bool = False, in_memory: bool = False) -> Corpus:
    """Open a corpus that `tunewell prepare` wrote; raise UserError if it is missing, incomplete or damaged.

    The size of every file is always checked; `verify=True` also checks the hashes. Shards are memory-mapped;
    `in_memory=True` reads them into memory, which is faster on disks where mapping is slow.
    """
    corpus = Corpus(Path(path))
    corpus.verify() if verify else corpus.check_sizes()
    if in_memory:
        corpus.load_in_memory()
        corpus.held_out.load_in_memory()
        corpus.selection.load_in_memory()
    return corpus


def _read_digests(path: Path, *, in_memory: bool) -> Hashes:
    return np.load(path, mmap_mode=None if in_memory else "r", allow_pickle=False)


def _damaged(path: Path) -> UserError:
    state = "differs from the manifest" if path.is_file() else "is missing"
    return UserError(f"the corpus is damaged: `{path}` {state}", fix="run `tunewell prepare` again to rewrite the file")


def _stamp(folder: Path) -> tuple[int, int, int] | None:
    try:
        stat = (folder / MANIFEST).stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
