"""Write a corpus from its documents: apply the length policy, mix the sources, pack, write shards and the manifest."""

import json
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tunewell.core.arrays import Bools, SmallInts
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
from tunewell.core.units import count, listed
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
    make_manifest,
    suggest_fix,
    suggest_rows,
)
from tunewell.data.sources.arrow import Lists, write_columns, write_lists
from tunewell.records.base import FileRecord
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
    supervised = np.empty(len(units), dtype=np.int32)

    def batch(first: int) -> dict[str, Lists]:
        """Return the sequences from `first`, and count the supervised tokens of their units."""
        bounds = packing.starts[first : min(first + per_batch, last) + 1]
        order = packing.order[bounds[0] : bounds[-1]]
        lengths = units.length[order].astype(np.int64)
        ends = np.cumsum(lengths)
        starts = ends - lengths
        begins = documents.begins[units.document[order]] + units.start[order]
        positions = np.repeat(begins - starts, lengths) + np.arange(int(ends[-1]))
        ids, is_supervised = documents.tokens[positions].astype(np.int32), documents.supervised[positions]
        is_supervised[starts] = False  # a first token has no context, or belongs to the previous piece
        supervised[order] = np.add.reduceat(is_supervised, starts, dtype=np.int64)
        labels = np.where(is_supervised, ids, np.int32(-100))  # PyTorch's cross entropy ignores it
        in_order = (bounds - bounds[0]).astype(np.int32)
        in_tokens = np.append(0, ends)[in_order].astype(np.int32)
        lists = (in_tokens, ids), (in_tokens, labels), (in_order, lengths.astype(np.int32))
        return dict(zip(COLUMNS, lists, strict=True))

    shards: list[ShardRecord] = []
    per_shard = max(1, shard_tokens // packing.context_length)
    per_batch = max(1, _BATCH_TOKENS // packing.context_length)
    num_shards = max(1, -(-packing.num_sequences // per_shard))
    for shard in range(num_shards):
        first, last = shard * per_shard, min((shard + 1) * per_shard, packing.num_sequences)
        path = folder / f"data-{shard:05d}-of-{num_shards:05d}.arrow"
        write_lists(path, map(batch, range(first, last, per_batch)), COLUMNS)
        shards.append(
            ShardRecord(file=path.name, bytes=path.stat().st_size, sha256=sha256_file(path), sequences=last - first)
        )
        progress(Progress("writing", last, packing.num_sequences, "sequences"))
    _write_index(folder, units, packing, documents, supervised)
    _write_dataset_files(folder, shards)
    return SplitRecord(
        documents=len(units),
        sequences=packing.num_sequences,
        tokens=packing.num_tokens,
        supervised=int(supervised.sum(dtype=np.int64)),
        shards=shards,
    )


def _write_index(
    folder: Path, units: Units, packing: PackedSequences, documents: Documents, supervised: SmallInts
) -> None:
    """Write the source, the row and the position of every unit, and the digests of its document."""
    sequence, start = np.empty((2, len(units)), dtype=np.int32)
    in_sequence, lengths = np.diff(packing.starts), units.length[packing.order].astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    sequence[packing.order] = np.repeat(np.arange(packing.num_sequences), in_sequence)
    start[packing.order] = starts - np.repeat(starts[packing.starts[:-1]], in_sequence)
    columns: dict[str, npt.NDArray[np.integer[Any]]] = {
        "source": documents.source[units.document],
        "row": documents.row[units.document],
        "sequence": sequence,
        "start": start,
        "length": units.length,
        "supervised": supervised,
        "piece_start": units.start,
    }
    write_columns(folder / "documents.arrow", columns)
    digests = (documents.whole, documents.question, documents.boundary[:, None])
    stored = np.hstack([column[units.document].astype("<u8") for column in digests])
    np.save(folder / DIGESTS, stored, allow_pickle=False)


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
        self._staging_dir = self.work_dir / "staging"

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
        is_corpus = not names or names >= _CORPUS_MARKERS
        if MANIFEST in names:
            with suppress(DamagedManifest):
                read_manifest(self.path)
                is_corpus = True
        if foreign or not is_corpus:
            raise UserError(
                f"the folder `{self.target}` is not a corpus, so it will not be overwritten",
                where=", ".join((foreign or sorted(names))[:5]),
                fix="choose another folder with `--out`, or move those files away",
            )

    def has_leftovers(self) -> bool:
        """Return True if an interrupted `prepare` left unfinished files."""
        return has_unfinished_publish(self.path) or self._staging_dir.exists()

    @contextmanager
    def locked(self) -> Generator[None]:
        """Lock the work folder and clean up after an interrupted `prepare`; raise UserError if it is already locked."""
        existing = next(folder for folder in self.work_dir.parents if folder.exists())
        with disk_full_as_user_error(existing, lambda: _SMALL_FILES_BYTES):
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
            with FolderLock.take(self.work_dir / "lock", doing=f"preparing `{self.target}`"):
                recover_publish(self.path)
                if self._staging_dir.exists():
                    shutil.rmtree(self._staging_dir)
                yield


@dataclass
class CorpusWriter:
    """The writer of the files of a corpus, in `assembly.folder / "corpus"`."""

    spec: BuildSpec
    assembly: Assembly
    space: SpaceEstimate

    @property
    def _corpus(self) -> Path:
        return self.assembly.folder / "corpus"

    def write(self, near_duplicates: NearDuplicateRecord | None = None) -> Manifest:
        """Write all files, the manifest last; raise UserError if no document is left or a document is too long."""
        documents, spec = self.assembly.documents, self.spec
        self._require_training_data()
        self.assembly.require_known_characters(spec.tokenizer.normalizer)
        context = choose_context_length(self._longest(), spec.packing.context_length, spec.context_limit)
        self._apply_length_policy(context)
        self._require_training_data()
        selected = self.assembly.take_selection(spec.data.selection)
        mix = self._mix()
        self._require_held_out_rows()
        units = {
            "train": self._units(documents.is_trained, context, mix),
            "selection": self._units(documents.is_selected, context, None),
            "held_out": self._units(documents.is_tested, context, None),
        }
        self.space.tokens = sum(int(some.length.sum(dtype=np.int64)) for some in units.values())
        require_disk_space(self._corpus, self.space.shard_bytes())
        splits: dict[str, WrittenSplit] = {}
        for name, some in units.items():
            if len(some):
                packing = pack(some.length, context.value)
                record = write_split(
                    self._corpus / name,
                    units=some,
                    packing=packing,
                    documents=documents,
                    shard_tokens=spec.packing.shard_tokens,
                    progress=spec.progress,
                )
                splits[name] = some, packing, record
        write_questions(self._corpus, self.assembly.known_questions)
        self.assembly.close()
        (self.assembly.folder / DROPPED).rename(self._corpus / DROPPED)
        (self._corpus / "dataset_dict.json").write_text(stable_json({"splits": list(splits)}), encoding="utf-8")
        spec.save_tokenizer(self._corpus / "tokenizer")
        manifest = make_manifest(
            spec, self.assembly, splits=splits, context=context, mix=mix, near_duplicates=near_duplicates
        ).model_copy(update={"selected": selected.value, "selected_because": selected.because})
        (self._corpus / "README.md").write_text(data_card(manifest), encoding="utf-8")
        manifest = self._with_files(manifest)
        sync_tree(self._corpus)
        write_manifest(self._corpus, manifest)
        return manifest

    def _with_files(self, manifest: Manifest) -> Manifest:
        """Return the manifest with the sizes and the hashes of all files."""
        known = {
            f"{name}/{shard.file}": shard.sha256 for name, split in manifest.splits.items() for shard in split.shards
        }
        files: dict[str, FileRecord] = {}
        for path in self._corpus.rglob("*"):
            if path.is_file():
                name = path.relative_to(self._corpus).as_posix()
                files[name] = FileRecord(bytes=path.stat().st_size, sha256=known.get(name) or sha256_file(path))
        shards = [f"{name}:{file.sha256}" for name, file in sorted(files.items()) if name.endswith(".arrow")]
        return manifest.model_copy(update={"files": files, "corpus_sha256": sha256_text(*shards)})

    def _longest(self) -> int:
        """Return the length of the longest document that is kept by the length policy."""
        documents, limit = self.assembly.documents, self.spec.context_limit
        lengths = documents.lengths[~documents.is_dropped]
        if self.spec.packing.long_documents == "drop" and limit is not None and (lengths <= limit).any():
            lengths = lengths[lengths <= limit]
        return int(lengths.max())

    def _require_held_out_rows(self) -> None:
        """Raise UserError if a held-out file is set and none of its rows can be used."""
        files = [index for index, job in enumerate(self.spec.jobs) if job.is_held_out]
        sources = [self.assembly.sources[index] for index in files]
        if files and not any(source.held_out for source in sources):
            reasons = ", ".join(
                f"{number:,} {reason}" for source in sources for reason, number in source.dropped.items()
            )
            raise UserError(
                "no row of the held-out file can be used",
                where=f"{sources[0].name}: {reasons or 'no row was read'}",
                fix="the file is read like the first source (`columns`, `map`, `format`): give it the same columns",
            )

    def _units(self, is_member: Bools, context: Chosen[int], mix: Mix | None) -> Units:
        documents = self.assembly.documents
        units = split_long(whole_units(np.flatnonzero(is_member), documents.lengths), context.value)
        if units.num_pieces:
            units = without_unsupervised(units, documents)
        return repeat(units, mix.copies[units.document]) if mix else units

    def _require_training_data(self) -> None:
        documents = self.assembly.documents
        if documents.is_trained.any():
            return
        num_rows = sum(source.rows for source in self.assembly.sources)
        reasons = [f"{number:,} {reason}" for reason, number in self.assembly.dropped.most_common()]
        if held_out := int(documents.is_tested.sum()):
            reasons.append(f"{held_out:,} held out")
        where = ", ".join(reasons) or "no row was read"
        if first := self.assembly.first_dropped:
            where += f"; first: {first['source']} row {first['row']}: {first.get('detail') or first['reason']}"
        raise UserError(
            f"no training data: 0 of {count(num_rows, 'row')} can be used",
            where=where,
            fix=suggest_fix(first) if num_rows else suggest_rows(self.spec),
        )

    def _apply_length_policy(self, context: Chosen[int]) -> None:
        documents, policy = self.assembly.documents, self.spec.packing.long_documents
        too_long = np.flatnonzero((documents.lengths > context.value) & ~documents.is_dropped)
        if not len(too_long) or policy == "split":
            return
        if policy == "error":
            places = ((*self.assembly.place(index), documents.lengths[index]) for index in too_long.tolist())
            named = [f"{source} row {row} ({length:,} tokens)" for source, row, length in places]
            is_model_limit = self.spec.context_limit is not None and context.value >= self.spec.context_limit
            longest = int(documents.lengths[too_long].max())
            raise_length = "" if is_model_limit else f"set `packing.context_length` to at least {longest:,}, or "
            are = "documents are" if len(too_long) > 1 else "document is"
            raise UserError(
                f"{len(too_long):,} {are} longer than the {context.value:,} tokens of a sequence",
                where=listed(named),
                fix=f"{raise_length}set `packing.long_documents` to `split` or `drop`",
            )
        for index in too_long.tolist():
            detail = f"{documents.lengths[index]:,} tokens; a sequence has {context.value:,}"
            self.assembly.drop_document(index, "too_long", detail)

    def _mix(self) -> Mix | None:
        spec, documents = self.spec, self.assembly.documents
        if not spec.shares:
            return None
        groups = [job.source_index if job.source_index in spec.shares else NO_SHARE for job in spec.jobs]
        group = np.asarray(groups, dtype=np.int32)[documents.source]
        is_open = documents.is_trained
        mix = mix_sources(
            np.where(is_open, group, np.int32(-1)), documents.order_key, spec.shares, spec.data.max_repeats
        )
        for index in np.flatnonzero(is_open & (mix.copies == 0)).tolist():
            self.assembly.drop_document(index, "not_sampled")
        return mix
