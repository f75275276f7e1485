"""Build an index: read the documents, cut passages, embed what is new, and write the store.

    documents -> passages -> spool on disk -> vectors (from the old index, an interrupted run, or computed) -> store

Memory holds one document, one block of passages and 32 bytes per passage. Vectors are appended to a cache in the work
folder as they are computed, so that an interrupted run goes on where it stopped.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import numpy as np

from tunewell.core.cache import cache_folder
from tunewell.core.errors import UserError
from tunewell.core.files import disk_full_as_user_error, make_private, open_file, sha256_text
from tunewell.core.progress import Progress, ProgressListener, silent
from tunewell.core.units import count
from tunewell.core.version import made_by
from tunewell.data.reading_prompt import Passage
from tunewell.features.retrieval.documents import DocumentLedger, FoundFile, find_documents, parse, read_bytes
from tunewell.features.retrieval.embedders.base import Embedder
from tunewell.features.retrieval.passages import cut
from tunewell.features.retrieval.readers.blocks import Unreadable
from tunewell.features.retrieval.records import (
    DamagedIndex,
    DocumentCounts,
    EmbedderRecord,
    IndexManifest,
    SearchSettings,
)
from tunewell.features.retrieval.stores.base import (
    IndexedDocument,
    Store,
    json_line,
    parse_passage,
    shown_address,
    store_class,
)
from tunewell.features.retrieval.words import LANGUAGES, index_language
from tunewell.records.plan import Chosen

_BLOCK = 1024
"""Number of passages that are handed to the embedder together."""
_LANGUAGE_PASSAGES = 200

_SETTINGS = SearchSettings(
    vector_weight=Chosen[float](value=0.6, because="best on Cranfield; `--questions` measures one for your documents"),
    num_passages=Chosen[int](value=5, because="the usual number; `--questions` measures how many are needed"),
    refusal=Chosen[list[float]](value=[], because="no questions to measure a threshold on"),
)


@dataclass
class BuiltIndex:
    """A finished index."""

    manifest: IndexManifest
    notes: list[str] = field(default_factory=list[str])
    seconds: float = 0.0


def build_index(
    paths: list[str],
    address: str,
    embedder: Embedder,
    *,
    language: str = "auto",
    questions: str | None = None,
    progress: ProgressListener = silent,
) -> BuiltIndex:
    """Index documents, or update an index; raise UserError, and keep the old index, if that fails.

    The file of `questions` is not indexed.
    """
    began = time.perf_counter()
    if language not in ("auto", *LANGUAGES):
        known = ", ".join(f"`{name}`" for name in ("auto", *LANGUAGES))
        raise UserError(f"unknown language `{language}`", fix=f"use one of {known}")
    store = store_class(address)
    ledger = DocumentLedger()
    files = find_documents(paths, ledger, questions=questions)
    with store.lock(address):
        old, notes = _open_old(store, address, embedder)
        work = _work_folder(address)
        with disk_full_as_user_error(work, lambda: 1 << 30):
            spool = Spool(work)
            reused = old if old is not None and old.manifest.has_hashes else None
            notes += _read_all(files, spool, ledger, embedder, reused, progress)
            if not len(spool):
                skipped = ", ".join(f"{number} {reason}" for reason, number in ledger.skipped.items())
                raise UserError(
                    "no document has any text",
                    where=f"skipped: {skipped}",
                    fix="scanned documents need OCR first; damaged ones must be saved again",
                )
            chosen_language = _language(language, spool)
            embedded = _embed(spool, work, embedder, reused, progress)
        if old is not None:
            old.close()
        manifest = IndexManifest(
            made_by=made_by(),
            created=datetime.now().astimezone().isoformat("T", "seconds"),
            embedder=EmbedderRecord(**{name: getattr(embedder, name) for name in EmbedderRecord.model_fields}),
            language=chosen_language,
            counts=DocumentCounts(
                files=ledger.num_files,
                indexed=ledger.num_indexed,
                skipped=dict(ledger.skipped),
                examples=ledger.examples,
                passages=len(spool),
                duplicates=spool.num_duplicates,
                embedded=embedded,
            ),
            settings=old.manifest.settings if old is not None else _default_settings(embedder),
            documents_sha256=sha256_text(*(part for entry in spool.documents for part in (entry.name, entry.sha256))),
            arguments=[*paths, "--embedder", embedder.name, "--language", language],
            seconds=((old.manifest.seconds or 0.0) if old is not None else 0.0) + time.perf_counter() - began,
        )
        manifest = store.write(address, spool, manifest, progress=progress)
        shutil.rmtree(work, ignore_errors=True)
    return BuiltIndex(manifest, [*notes, *ledger.notes], time.perf_counter() - began)


def _open_old(store: type[Store], address: str, embedder: Embedder) -> tuple[Store | None, list[str]]:
    """Open the index that is to be updated, if there is one. Raise UserError if its embedder is another one."""
    if not store.exists(address):
        return None, []
    try:
        old = store.open(address)
    except DamagedIndex as error:
        return None, [f"{error.what} ({error.where}); it was created again, with the default search settings"]
    if old.manifest.embedder.sha256 != embedder.sha256:
        raise UserError(
            f"the index was made with the embedder `{old.manifest.embedder.name}`, not with `{embedder.name}`",
            where=shown_address(address),
            fix=f"name another folder with `--out`, or use `--embedder {old.manifest.embedder.name}`",
        )
    return old, []


def _default_settings(embedder: Embedder) -> SearchSettings:
    if embedder.unrelated_cosine is None:
        return _SETTINGS
    refusal = Chosen[list[float]](
        value=[1.0, 0.0, 0.0, -embedder.unrelated_cosine],
        because="only unrelated questions are refused; `--questions` measures a threshold",
    )
    return _SETTINGS.model_copy(update={"refusal": refusal})


def _work_folder(address: str) -> Path:
    if "://" not in address:
        folder = Path(address).expanduser() / ".work"
    elif (cache := cache_folder("index")) is not None:
        folder = cache / sha256_text(shown_address(address))[:16]
    else:
        raise UserError("the cache folder cannot be written", fix="set TUNEWELL_CACHE to a folder that can be written")
    make_private(folder.parent)
    make_private(folder)
    return folder


class Spool:
    """The passages of a new index on disk, in order, without duplicates."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "passages.jsonl"
        self._file: BinaryIO | None = open_file(self._path, "wb")
        self._seen: set[bytes] = set()
        self.keys: list[bytes] = []
        self.documents: list[IndexedDocument] = []
        self.num_duplicates = 0
        self.vectors = np.empty((0, 0), np.float32)

    def __len__(self) -> int:
        return len(self.keys)

    def add(self, passage: Passage) -> bool:
        """Append a passage; return False if an equal one is there already."""
        assert self._file is not None
        key = bytes.fromhex(passage.key)
        if key in self._seen:
            self.num_duplicates += 1
            return False
        self._seen.add(key)
        self.keys.append(key)
        self._file.write(json_line(passage) + b"\n")
        return True

    def passages(self) -> Iterator[Passage]:
        """Yield the passages in order."""
        if self._file is not None:
            self._file.close()
            self._file = None
        with open_file(self._path) as lines:
            yield from map(parse_passage, lines)


def _read_all(
    files: list[FoundFile],
    spool: Spool,
    ledger: DocumentLedger,
    embedder: Embedder,
    old: Store | None,
    progress: ProgressListener,
) -> list[str]:
    """Read every document into the spool. Passages of unchanged documents come from the old index."""
    known = {entry.name: entry for entry in old.documents()} if old is not None else {}
    notes: list[str] = []
    for number, file in enumerate(files):
        progress(Progress("reading documents", number, len(files), "files"))
        first, duplicates = len(spool), spool.num_duplicates
        try:
            data, sha256 = read_bytes(file)
            entry = known.get(file.name)
            if old is not None and entry is not None and entry.sha256 == sha256 and not entry.num_duplicates:
                passages = iter(old.passages(range(entry.first, entry.first + entry.num_passages)))
            else:
                document = parse(file, data, sha256)
                notes += [f"`{file.name}`: {note}" for note in document.content.notes]
                passages = cut(document, count_tokens=embedder.count_tokens, max_tokens=embedder.max_tokens)
            for passage in passages:
                spool.add(passage)
        except Unreadable as error:
            detail = str(error)
            ledger.skip(file.name, error.reason, "" if detail == error.reason else detail)
            continue
        ledger.num_indexed += 1
        dropped = spool.num_duplicates - duplicates
        spool.documents.append(IndexedDocument(file.name, sha256, first, len(spool) - first, dropped))
    progress(Progress("reading documents", len(files), len(files), "files"))
    if gone := sorted(known.keys() - {file.name for file in files}):
        notes.append(f"no longer in the index: {count(len(gone), 'document')}, such as `{gone[0]}`")
    return notes


def _language(language: str, spool: Spool) -> Chosen[str]:
    if language != "auto":
        return Chosen[str](value=language, because="set with `--language`")
    sample = [passage.text for passage, _ in zip(spool.passages(), range(_LANGUAGE_PASSAGES), strict=False)]
    found = index_language(sample)
    because = "the frequent words of the documents" if found != "none" else "no language with a stemmer was recognised"
    return Chosen[str](value=found, because=because)


def _embed(spool: Spool, work: Path, embedder: Embedder, old: Store | None, progress: ProgressListener) -> int:
    """Fill `spool.vectors`. Return the number of passages that had to be embedded."""
    stored = ComputedVectors(work, embedder)
    known = old.keys() if old is not None else {}
    path = work / "vectors.npy"
    path.unlink(missing_ok=True)  # numpy would write through a link
    spool.vectors = np.lib.format.open_memmap(path, "w+", np.float32, (len(spool), embedder.dimension))
    _reserve(path)
    missing = {key for key in spool.keys if key not in known and key not in stored.numbers}
    total = len(missing) + len(stored.numbers)

    def report() -> None:
        progress(Progress("embedding passages", len(stored.numbers), total, "passages"))

    if missing:
        report()
        keyed = zip(spool.keys, spool.passages(), strict=True)
        waiting = ((key, passage.searched) for key, passage in keyed if key in missing)
        while block := list(islice(waiting, _BLOCK)):
            stored.compute(block, embedder, report)
    computed = stored.vectors()
    for start in range(0, len(spool), _BLOCK):
        keys = spool.keys[start : start + _BLOCK]
        rows = spool.vectors[start : start + _BLOCK]
        is_known = np.array([key in known for key in keys])
        if old is not None and is_known.any():
            rows[is_known] = old.vectors([known[key] for key in keys if key in known])
        rows[~is_known] = computed[[stored.numbers[key] for key in keys if key not in known]]
    spool.vectors.flush()
    return len(missing)


def _reserve(path: Path) -> None:
    """Reserve the disk space of a file: writing to a memory-mapped file on a full disk would kill the process."""
    if hasattr(os, "posix_fallocate"):
        with open_file(path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


class ComputedVectors:
    """Vectors on disk by the hash of their text, appended as they are computed. A torn end is cut off."""

    def __init__(self, folder: Path, embedder: Embedder) -> None:
        self._dimension = embedder.dimension
        self._keys = folder / f"{embedder.sha256[:16]}.keys"
        self._vectors = folder / f"{embedder.sha256[:16]}.vectors"
        for path in (self._keys, self._vectors):
            open_file(path, "ab").close()
        width = 4 * self._dimension
        number = min(self._keys.stat().st_size // 32, self._vectors.stat().st_size // width)
        for path, size in ((self._keys, 32), (self._vectors, width)):
            with open_file(path, "r+b") as file:
                file.truncate(number * size)
        keys = self._keys.read_bytes()
        self.numbers = {keys[32 * place : 32 * place + 32]: place for place in range(number)}

    def compute(self, block: list[tuple[bytes, str]], embedder: Embedder, report: Callable[[], None]) -> None:
        """Embed texts, given with their hashes, and append their vectors."""
        keys, texts = zip(*block, strict=True)

        def on_batch(indices: list[int], computed: np.ndarray) -> None:
            self.append([keys[index] for index in indices], computed)
            report()

        embedder.embed(list(texts), on_batch=on_batch)

    def append(self, keys: list[bytes], vectors: np.ndarray) -> None:
        """Append vectors. The keys are written last: a vector without a key is cut off by the next run."""
        with open_file(self._vectors, "ab") as file:
            file.write(np.ascontiguousarray(vectors, np.float32).tobytes())
        with open_file(self._keys, "ab") as file:
            file.write(b"".join(keys))
        for key in keys:
            self.numbers[key] = len(self.numbers)

    def vectors(self) -> np.ndarray:
        """Return all vectors, memory-mapped."""
        if not self.numbers:
            return np.empty((0, self._dimension), np.float32)
        return np.memmap(self._vectors, np.float32, "r", shape=(len(self.numbers), self._dimension))
