"""Write packed sequences as Arrow shards that the `datasets` library can open."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tunewell.core.files import sha256_file, sha256_text, stable_json
from tunewell.core.progress import Progress, ProgressListener, silent
from tunewell.data.corpus.assembly import Documents
from tunewell.data.corpus.packing import Packing, Units
from tunewell.data.sources.arrow import Lists, write_columns, write_lists
from tunewell.records.manifest import ShardRecord, SplitRecord

SHARD_TOKENS = 1 << 22
_BATCH_TOKENS = 1 << 18
BYTES_PER_TOKEN = 8
"""Bytes per token in a shard: an id and a label of 4 bytes each."""

COLUMNS = ("input_ids", "labels", "seq_lengths")


def write_split(
    folder: Path, *, units: Units, packing: Packing, documents: Documents, progress: ProgressListener = silent
) -> SplitRecord:
    """Write the sequences of a split, the index of its documents and the metadata files of `datasets`."""
    folder.mkdir(parents=True)
    sequences = _Sequences(units, packing, documents)
    shards: list[ShardRecord] = []
    per_shard = max(1, SHARD_TOKENS // packing.context_length)
    per_batch = max(1, _BATCH_TOKENS // packing.context_length)
    num_shards = max(1, -(-packing.num_sequences // per_shard))
    for shard in range(num_shards):
        first, last = shard * per_shard, min((shard + 1) * per_shard, packing.num_sequences)
        path = folder / f"data-{shard:05d}-of-{num_shards:05d}.arrow"
        starts = range(first, last, per_batch)
        write_lists(path, (sequences.batch(start, min(start + per_batch, last)) for start in starts), COLUMNS)
        shards.append(
            ShardRecord(file=path.name, bytes=path.stat().st_size, sha256=sha256_file(path), sequences=last - first)
        )
        progress(Progress("writing", last, packing.num_sequences, "sequences"))
    sequences.write_index(folder / "documents.arrow")
    _write_dataset_files(folder, shards)
    return SplitRecord(
        documents=len(units),
        sequences=packing.num_sequences,
        tokens=packing.num_tokens,
        supervised=int(sequences.supervised.sum(dtype=np.int64)),
        shards=shards,
    )


class _Sequences:
    """A builder of the sequences of a split. It works in batches and records the position of each unit."""

    def __init__(self, units: Units, packing: Packing, documents: Documents) -> None:
        self._units = units
        self._packing = packing
        self._documents = documents
        self._sequence = np.empty(len(units), dtype=np.int32)
        self._start = np.empty(len(units), dtype=np.int32)
        self.supervised = np.empty(len(units), dtype=np.int32)

    def batch(self, first: int, last: int) -> dict[str, Lists]:
        """Return the sequences from `first` up to, but not including, `last`."""
        bounds = self._packing.starts[first : last + 1]
        order = self._packing.order[bounds[0] : bounds[-1]]
        lengths = self._units.length[order].astype(np.int64)
        begins = self._documents.begins[self._units.document[order]] + self._units.start[order]
        ends = np.cumsum(lengths)
        starts = ends - lengths
        positions = np.repeat(begins - starts, lengths) + np.arange(int(ends[-1]))
        ids = self._documents.tokens[positions].astype(np.int32)
        is_supervised = self._documents.supervised[positions]
        is_supervised[starts] = False  # a first token has no context, or belongs to the previous piece
        in_order = (bounds - bounds[0]).astype(np.int32)
        in_tokens = np.concatenate([[0], ends])[in_order].astype(np.int32)
        of_sequence = np.repeat(np.arange(last - first), np.diff(in_order))
        self._sequence[order] = first + of_sequence
        self._start[order] = starts - in_tokens[of_sequence]
        self.supervised[order] = np.add.reduceat(is_supervised, starts, dtype=np.int64)
        labels = np.where(is_supervised, ids, np.int32(-100))  # PyTorch's cross entropy ignores it
        lists = (in_tokens, ids), (in_tokens, labels), (in_order, lengths.astype(np.int32))
        return dict(zip(COLUMNS, lists, strict=True))

    def write_index(self, path: Path) -> None:
        """Write the source, the row, the sequence and the position of every unit."""
        columns: dict[str, npt.NDArray[np.integer[Any]]] = {
            "source": self._documents.source[self._units.document],
            "row": self._documents.row[self._units.document],
            "sequence": self._sequence,
            "start": self._start,
            "length": self._units.length,
            "supervised": self.supervised,
            "piece_start": self._units.start,
        }
        write_columns(path, columns)


def _write_dataset_files(folder: Path, shards: list[ShardRecord]) -> None:
    """Write the files for `datasets.load_from_disk`, without features, so that any version can open the corpus."""
    state: dict[str, object] = {
        "_data_files": [{"filename": shard.file} for shard in shards],
        "_fingerprint": sha256_text(*(shard.sha256 for shard in shards))[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": folder.name,
    }
    (folder / "state.json").write_text(stable_json(state), encoding="utf-8")
    (folder / "dataset_info.json").write_text(
        json.dumps({"description": "Packed by tunewell.", "citation": "", "homepage": "", "license": ""}) + "\n",
        encoding="utf-8",
    )
