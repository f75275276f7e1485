"""Write a corpus from its documents: apply the length policy, mix the sources, pack, write shards and the manifest."""

import json
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tunewell.core.arrays import Bools
from tunewell.core.errors import UserError
from tunewell.core.files import (
    FolderLock,
    disk_full_as_user_error,
    has_unfinished_publish,
    is_disk_full,
    make_private,
    recover_publish,
    require_disk_space,
    require_output_path,
    sha256_file,
    sha256_text,
    stable_json,
    sync_tree,
    write_atomic,
)
from tunewell.core.progress import Progress, ProgressListener, silent
from tunewell.core.units import count
from tunewell.data.corpus.assembly import Assembly, Documents, SpaceEstimate
from tunewell.data.corpus.held_out import write_questions
from tunewell.data.corpus.packing import (
    Mix,
    PackedSequences,
    Units,
    choose_context_length,
    mix_sources,
    pack,
    repeat,
    split_long,
    whole_units,
    without_unsupervised,
)
from tunewell.data.corpus.reader import open_corpus
from tunewell.data.corpus.spec import NO_SHARE, BuildSpec
from tunewell.data.corpus.summary import (
    WrittenSplit,
    data_card,
    describe_file,
    make_manifest,
    suggest_fix,
    suggest_rows,
    total_dropped,
)
from tunewell.data.sources.arrow import Lists, write_columns, write_lists
from tunewell.records.manifest import (
    COLUMNS,
    CORPUS_NAMES,
    DIGESTS,
    DROPPED,
    MANIFEST,
    DamagedManifest,
    Manifest,
    NearDuplicateRecord,
    ShardRecord,
    SplitRecord,
    read_manifest,
    write_manifest,
)
from tunewell.records.plan import Chosen

# Write packed sequences as Arrow shards that the `datasets` library can open.

_BATCH_TOKENS = 1 << 18


def write_split(
    folder: Path,
    *,
    units: Units,
    packing: PackedSequences,
    documents: Documents,
    shard_tokens: int,
    progress: ProgressListener = silent,
) -> SplitRecord:
    """Write the sequences of a split, the index of its documents and the metadata files of `datasets`."""
    folder.mkdir(parents=True)
    sequences = _Sequences(units, packing, documents)
    shards: list[ShardRecord] = []
    per_shard = max(1, shard_tokens // packing.context_length)
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
    sequences.write_digests(folder / DIGESTS)
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

    def __init__(self, units: Units, packing: PackedSequences, documents: Documents) -> None:
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

    def write_digests(self, path: Path) -> None:
        """Write the digests of every unit, so that corpora can be mixed as if they were prepared together."""
        own = self._units.document
        columns = (self._documents.whole[own], self._documents.question[own], self._documents.boundary[own, None])
        np.save(path, np.hstack([column.astype("<u8") for column in columns]), allow_pickle=False)


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


_CORPUS_MARKERS = frozenset({"dataset_dict.json", "dropped.jsonl", "train"})
"""Files that identify a folder as a corpus if the manifest is missing."""
_SMALL_FILES_BYTES = 4096


class CorpusOutput:
    """The folder of a corpus and its work folder. Both are on the same disk, so that the corpus can be moved."""

    def __init__(self, target: Path) -> None:
        require_output_path(target)
        self.target = target
        self.path = target.resolve()  # replace the folder that a symlink points to, not the symlink
        self.work_dir = self.path.parent / ".tunewell" / f"prepare-{self.path.name}"

    def find_current(self, spec: BuildSpec) -> Manifest | None:
        """Return the manifest of the existing corpus if it is intact and was built from the same inputs."""
        try:
            manifest = read_manifest(self.path)
            if manifest.inputs_sha256 != spec.inputs_sha256 or manifest.made_by != spec.made_by:
                return None
            return open_corpus(self.path, verify=True).manifest
        except UserError:
            return None  # missing or damaged; the corpus is rebuilt from the cached blocks

    def require_replaceable(self) -> None:
        """Raise UserError if the folder contains anything that `prepare` did not write."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"`{self.target}` is a file", fix="choose another folder with `--out`")
        names = {entry.name for entry in self.path.iterdir()} - {".DS_Store"} if self.path.is_dir() else set[str]()
        foreign = sorted(names - CORPUS_NAMES)
        if foreign or (names and not self._is_corpus(names)):
            raise UserError(
                f"the folder `{self.target}` is not a corpus, so it will not be overwritten",
                where=", ".join((foreign or sorted(names))[:5]),
                fix="choose another folder with `--out`, or move those files away",
            )

    def _is_corpus(self, names: set[str]) -> bool:
        if MANIFEST in names:
            try:
                read_manifest(self.path)
                return True
            except DamagedManifest:
                pass
        return names >= _CORPUS_MARKERS

    def has_leftovers(self) -> bool:
        """Return True if an interrupted `prepare` left unfinished files."""
        return has_unfinished_publish(self.path) or self._staging_dir.exists()

    @contextmanager
    def locked(self) -> Generator[None]:
        """Lock the work folder and clean up after an interrupted `prepare`; raise UserError if it is already locked."""
        existing = next(folder for folder in self.work_dir.parents if folder.exists())
        with disk_full_as_user_error(existing, lambda: _SMALL_FILES_BYTES):
            self._make_work_dir()
            with FolderLock.take(self.work_dir / "lock", doing=f"preparing `{self.target}`"):
                recover_publish(self.path)
                if self._staging_dir.exists():
                    shutil.rmtree(self._staging_dir)
                yield

    def _make_work_dir(self) -> None:
        try:
            make_private(self.work_dir.parent)
            make_private(self.work_dir)
            write_atomic(self.work_dir.parent / ".gitignore", "*\n")
        except OSError as error:
            if is_disk_full(error):
                raise
            raise UserError(
                f"the folder `{self.target}` cannot be written: {error.strerror}",
                fix="make its parent folder writable, or choose another folder with `--out`",
            ) from error

    @property
    def _staging_dir(self) -> Path:
        return self.work_dir / "staging"


_NUM_NAMED = 5


class CorpusWriter:
    """The writer of the files of a corpus, in `assembly.folder / "corpus"`."""

    def __init__(self, spec: BuildSpec, assembly: Assembly, documents: Documents, space: SpaceEstimate) -> None:
        self._spec = spec
        self._assembly = assembly
        self._documents = documents
        self._space = space
        self._corpus = assembly.folder / "corpus"

    def write(self, near_duplicates: NearDuplicateRecord | None = None) -> Manifest:
        """Write all files, the manifest last; raise UserError if no document is left or a document is too long."""
        documents, spec = self._documents, self._spec
        self._require_training_data()
        self._assembly.require_known_characters(spec.tokenizer.normalizer)
        context = choose_context_length(self._longest(), spec.packing.context_length, spec.context_limit)
        self._apply_length_policy(context)
        self._require_training_data()
        mix = self._mix()
        members = {"train": ~documents.is_held_out, "held_out": documents.is_held_out}
        self._require_held_out_rows()
        units = {name: self._units(is_member, context, mix, name) for name, is_member in members.items()}
        self._space.tokens = sum(int(some.length.sum(dtype=np.int64)) for some in units.values())
        require_disk_space(self._corpus, self._space.shard_bytes())
        splits = {name: self._write_split(name, some, context) for name, some in units.items() if len(some)}
        write_questions(self._corpus, self._assembly.known_questions)
        self._assembly.close()
        (self._assembly.folder / DROPPED).rename(self._corpus / DROPPED)
        (self._corpus / "dataset_dict.json").write_text(stable_json({"splits": list(splits)}), encoding="utf-8")
        spec.save_tokenizer(self._corpus / "tokenizer")
        return self._write_manifest(splits, context, mix, near_duplicates)

    def _longest(self) -> int:
        """Return the length of the longest document that is kept by the length policy."""
        lengths, limit = self._documents.lengths[~self._documents.is_dropped], self._spec.context_limit
        if self._spec.packing.long_documents == "drop" and limit is not None and (lengths <= limit).any():
            lengths = lengths[lengths <= limit]
        return int(lengths.max())

    def _require_held_out_rows(self) -> None:
        """Raise UserError if a held-out file is set and none of its rows can be used."""
        files = [index for index, job in enumerate(self._spec.jobs) if job.is_held_out]
        sources = [self._assembly.sources[index] for index in files]
        if files and not any(source.held_out for source in sources):
            reasons = ", ".join(
                f"{number:,} {reason}" for source in sources for reason, number in source.dropped.items()
            )
            raise UserError(
                "no row of the held-out file can be used",
                where=f"{sources[0].name}: {reasons or 'no row was read'}",
                fix="the file is read like the first source (`columns`, `map`, `format`): give it the same columns",
            )

    def _units(self, is_member: Bools, context: Chosen[int], mix: Mix | None, name: str) -> Units:
        units = whole_units(np.flatnonzero(is_member & ~self._documents.is_dropped), self._documents.lengths)
        units = split_long(units, context.value)
        if units.num_pieces:
            units = without_unsupervised(units, self._documents)
        return repeat(units, mix.copies[units.document]) if mix and name == "train" else units

    def _write_split(self, name: str, units: Units, context: Chosen[int]) -> WrittenSplit:
        packing, folder, progress = pack(units.length, context.value), self._corpus / name, self._spec.progress
        record = write_split(
            folder,
            units=units,
            packing=packing,
            documents=self._documents,
            shard_tokens=self._spec.packing.shard_tokens,
            progress=progress,
        )
        return units, packing, record

    def _require_training_data(self) -> None:
        documents = self._documents
        if not (documents.is_held_out | documents.is_dropped).all():
            return
        num_rows = sum(source.rows for source in self._assembly.sources)
        dropped = total_dropped(self._assembly).most_common()
        reasons = [f"{number:,} {reason}" for reason, number in dropped]
        if held_out := int((documents.is_held_out & ~documents.is_dropped).sum()):
            reasons.append(f"{held_out:,} held out")
        self._assembly.close()
        with (self._assembly.folder / DROPPED).open(encoding="utf-8") as lines:
            line = lines.readline()
        where = ", ".join(reasons) or "no row was read"
        first: dict[str, str] = json.loads(line) if line else {}
        if first:
            where += f"; first: {first['source']} row {first['row']}: {first.get('detail') or first['reason']}"
        raise UserError(
            f"no training data: 0 of {count(num_rows, 'row')} can be used",
            where=where,
            fix=suggest_fix(first) if num_rows else suggest_rows(self._spec),
        )

    def _apply_length_policy(self, context: Chosen[int]) -> None:
        documents, policy = self._documents, self._spec.packing.long_documents
        too_long = np.flatnonzero((documents.lengths > context.value) & ~documents.is_dropped)
        if not len(too_long) or policy == "split":
            return
        if policy == "error":
            named = [f"{self._name(i)} ({documents.lengths[i]:,} tokens)" for i in too_long[:_NUM_NAMED].tolist()]
            more = f" and {len(too_long) - _NUM_NAMED:,} more" if len(too_long) > _NUM_NAMED else ""
            is_model_limit = self._spec.context_limit is not None and context.value >= self._spec.context_limit
            longest = int(documents.lengths[too_long].max())
            raise_length = "" if is_model_limit else f"set `packing.context_length` to at least {longest:,}, or "
            are = "documents are" if len(too_long) > 1 else "document is"
            raise UserError(
                f"{len(too_long):,} {are} longer than the {context.value:,} tokens of a sequence",
                where=", ".join(named) + more,
                fix=f"{raise_length}set `packing.long_documents` to `split` or `drop`",
            )
        for index in too_long.tolist():
            detail = f"{documents.lengths[index]:,} tokens; a sequence has {context.value:,}"
            self._assembly.drop_document(documents, index, "too_long", detail)

    def _name(self, index: int) -> str:
        return f"{self._assembly.sources[int(self._documents.source[index])].name} row {self._documents.row[index]}"

    def _mix(self) -> Mix | None:
        spec, documents = self._spec, self._documents
        if not spec.shares:
            return None
        groups = [job.source_index if job.source_index in spec.shares else NO_SHARE for job in spec.jobs]
        group = np.asarray(groups, dtype=np.int32)[documents.source]
        is_open = ~documents.is_held_out & ~documents.is_dropped
        open_group = np.where(is_open, group, -1).astype(np.int32)
        mix = mix_sources(open_group, documents.order_key, spec.shares, spec.data.max_repeats)
        for index in np.flatnonzero(is_open & (mix.copies == 0)).tolist():
            self._assembly.drop_document(documents, index, "not_sampled")
        return mix

    def _write_manifest(
        self,
        splits: dict[str, WrittenSplit],
        context: Chosen[int],
        mix: Mix | None,
        near_duplicates: NearDuplicateRecord | None,
    ) -> Manifest:
        documents = self._documents
        is_trained = ~documents.is_held_out & ~documents.is_dropped
        boundary = np.where(is_trained, documents.boundary, 0)
        paths = sorted(path for path in self._corpus.rglob("*") if path.is_file())
        known = {f"{name}/{shard.file}": shard for name, (_, _, record) in splits.items() for shard in record.shards}
        names = {path.relative_to(self._corpus).as_posix(): path for path in paths}
        files = {name: describe_file(path, known.get(name)) for name, path in names.items()}
        manifest = make_manifest(
            self._spec,
            self._assembly,
            splits=splits,
            lengths=documents.lengths[is_trained],
            boundary_tokens=int((boundary * mix.copies if mix else boundary).sum(dtype=np.int64)),
            context=context,
            mix=mix,
            files=files,
            near_duplicates=near_duplicates,
        )
        card = self._corpus / "README.md"
        card.write_text(data_card(manifest), encoding="utf-8")
        manifest = manifest.model_copy(update={"files": {**files, card.name: describe_file(card)}})
        sync_tree(self._corpus)
        write_manifest(self._corpus, manifest)
        return manifest
