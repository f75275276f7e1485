"""Open a corpus: single documents, or packed sequences as a Hugging Face dataset."""

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tunewell.core.errors import UserError
from tunewell.core.files import sha256_file
from tunewell.core.optional import import_optional
from tunewell.data.corpus.shards import to_numpy
from tunewell.records.manifest import MANIFEST, Manifest, SplitRecord, read_manifest

Ids = npt.NDArray[np.int32]
_COLUMNS = ("input_ids", "labels", "seq_lengths")


@dataclass(frozen=True, slots=True)
class Document:
    """One document, with `labels` of -100 for tokens that are not supervised; fields can also be read by name."""

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


@dataclass(frozen=True)
class _Batch:
    """Some sequences of a shard: their ids and labels concatenated, and the offset of each sequence."""

    ids: Ids
    labels: Ids
    offsets: Ids


class Split:
    """The documents of one split, memory-mapped."""

    def __init__(self, folder: Path, record: SplitRecord | None, sources: list[str], check: Callable[[], None]) -> None:
        self.folder = folder
        self._record = record
        self._sources = sources
        self._check = check
        self._is_in_memory = False
        self._shards: dict[int, tuple[npt.NDArray[np.int64], list[_Batch]]] = {}

    def __len__(self) -> int:
        return self._record.documents if self._record else 0

    def __iter__(self) -> Iterator[Document]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: SupportsIndex) -> Document:
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"document {number} does not exist: there are {len(self)}")
        number %= len(self)
        ids, labels = self.arrays(number)
        source = self._sources[int(self.index["source"][number])]
        return Document(ids.tolist(), labels.tolist(), source, int(self.index["row"][number]))

    def arrays(self, index: int) -> tuple[Ids, Ids]:
        """Return the ids and labels of a document as views of the mapped shard, without copying."""
        sequence = int(self.index["sequence"][index])
        shard = _find_range(self._first_sequences, sequence)
        firsts, batches = self._shard(shard)
        sequence -= int(self._first_sequences[shard])
        batch = _find_range(firsts, sequence)
        found = batches[batch]
        begin = int(found.offsets[sequence - firsts[batch]]) + int(self.index["start"][index])
        end = begin + int(self.index["length"][index])
        return found.ids[begin:end], found.labels[begin:end]

    @cached_property
    def index(self) -> dict[str, npt.NDArray[Any]]:
        """Return the columns of the index: source, row, sequence, start, length, supervised, piece_start."""
        if self._record is None:
            return {}
        table = self._mapped("documents.arrow", pa.ipc.open_file)
        return {name: to_numpy(table[name]) for name in table.column_names}

    @cached_property
    def _first_sequences(self) -> npt.NDArray[np.int64]:
        return _firsts([shard.sequences for shard in self._record.shards] if self._record else [])

    def _shard(self, number: int) -> tuple[npt.NDArray[np.int64], list[_Batch]]:
        if number not in self._shards:
            assert self._record is not None
            table = self._mapped(self._record.shards[number].file, pa.ipc.open_stream)
            batches = [
                _Batch(to_numpy(ids.values), to_numpy(labels.values), to_numpy(ids.offsets))
                for ids, labels in ((batch["input_ids"], batch["labels"]) for batch in table.to_batches())
            ]
            self._shards[number] = (_firsts([len(batch.offsets) - 1 for batch in batches]), batches)
        return self._shards[number]

    def _mapped(self, name: str, read: Callable[[Any], Any]) -> pa.Table:
        """Memory-map an Arrow file: pages are read on access and dropped when memory is short."""
        path = self.folder / name
        self._check()
        try:
            source = pa.BufferReader(path.read_bytes()) if self._is_in_memory else pa.memory_map(str(path))
            return read(source).read_all()
        except (OSError, pa.ArrowInvalid) as error:
            raise _damaged(path) from error

    def as_dataset(self) -> Any:
        """Return the packed sequences as a `datasets.Dataset` with `input_ids`, `labels`, `seq_lengths`."""
        datasets = import_optional("datasets", extra="datasets", purpose="opening a corpus as a dataset")
        if self._record is None:
            numbers = datasets.List(datasets.Value("int32"))
            features = datasets.Features(dict.fromkeys(_COLUMNS, numbers))
            return datasets.Dataset.from_dict({name: [] for name in _COLUMNS}, features=features)
        self._check()
        return datasets.load_from_disk(str(self.folder), keep_in_memory=self._is_in_memory)

    def load_in_memory(self) -> None:
        """Read all files into memory now: for disks on which memory-mapping is slow, like Windows drives under WSL."""
        self._is_in_memory = True
        self.__dict__.pop("index", None)
        self._shards.clear()
        if self._record is not None:
            _ = self.index
            for number in range(len(self._record.shards)):
                self._shard(number)


class Corpus(Split):
    """A corpus: its training documents, the `held_out` split and the manifest."""

    def __init__(self, folder: Path) -> None:
        stamp = _stamp(folder)
        self.path = folder
        self.manifest: Manifest = read_manifest(folder)

        def check() -> None:
            if _stamp(folder) != stamp:
                raise UserError(f"the corpus `{folder}` was replaced while it was open", fix="open it again")

        sources = [source.name for source in self.manifest.sources]
        super().__init__(folder / "train", self.manifest.splits.get("train"), sources, check)
        self.held_out = Split(folder / "held_out", self.manifest.splits.get("held_out"), sources, check)

    def verify(self) -> None:
        """Compare the hash of every file with the manifest; raise UserError for the first that differs."""
        self._check_sizes()
        for name, record in self.manifest.files.items():
            if sha256_file(self.path / name) != record.sha256:
                raise _damaged(self.path / name)

    def _check_sizes(self) -> None:
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
    corpus.verify() if verify else corpus._check_sizes()
    if in_memory:
        corpus.load_in_memory()
        corpus.held_out.load_in_memory()
    return corpus


def _damaged(path: Path) -> UserError:
    state = "differs from the manifest" if path.is_file() else "is missing"
    return UserError(
        f"the corpus is damaged: `{path}` {state}", fix="run `tunewell prepare` again; it writes the file again"
    )


def _stamp(folder: Path) -> tuple[int, int, int] | None:
    try:
        stat = (folder / MANIFEST).stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _firsts(sizes: list[int]) -> npt.NDArray[np.int64]:
    return np.cumsum(sizes, dtype=np.int64) - np.asarray(sizes, dtype=np.int64)


def _find_range(firsts: npt.NDArray[np.int64], number: int) -> int:
    return int(np.searchsorted(firsts, number, side="right")) - 1
