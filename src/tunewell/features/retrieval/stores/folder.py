"""An index in a folder: tantivy for words, memory-mapped vectors, no server.

INDEX/index.json              the manifest, replaced atomically as the last step
INDEX/data-1f03ab9c/          the content that the manifest names
    passages.jsonl            one passage per line, in reading order
    offsets.npy               start of each line
    keys.bin                  32 bytes per passage: the hash of its searched text
    vectors.npy               float32, one row per passage, memory-mapped
    clusters.faiss            vectors in clusters, above `EXACT_PASSAGES`
    words/                    the tantivy index
    documents.jsonl           name and SHA-256 of each document
"""

import errno
import os
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tunewell.core.cache import sha256_once
from tunewell.core.errors import UserError
from tunewell.core.files import (
    FolderLock,
    disk_full_as_user_error,
    make_private,
    open_file,
    parse_json,
    read_bytes,
    sha256_file,
    sync_folder,
    sync_tree,
)
from tunewell.core.optional import import_optional
from tunewell.core.progress import Progress, ProgressListener
from tunewell.data.reading_prompt import Passage
from tunewell.features.retrieval.records import (
    INDEX,
    DamagedIndex,
    IndexManifest,
    SearchSettings,
    read_index,
    write_index,
)
from tunewell.features.retrieval.stores.base import Hits, IndexedDocument, StoredPassages, json_line, parse_passage
from tunewell.features.retrieval.words import words
from tunewell.records.base import FileRecord

EXACT_PASSAGES = 50_000
"""Up to this number, all vectors are compared: 9 ms for a query on two cores. Above it, clusters are searched."""
_SCAN_ROWS = 16_384
_RECALL, _NEAREST, _MEASURED_QUERIES = 0.98, 10, 64
"""A query reads as many clusters as find 98% of the ten nearest passages, measured on 64 queries."""
_MIN_PROBED = 2
_DATA = "data-"
_STAGED = ".staged-"
_LOCK = ".lock"
_OS_ERROR = re.compile(r"\(os error (\d+)\)|No space left on device")


class FolderStore:
    """An index in a folder, open for reading."""

    def __init__(self, folder: Path, manifest: IndexManifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._data = folder / manifest.generation
        self._check_files()
        self._offsets = np.load(self._data / "offsets.npy", mmap_mode="r")
        self._vectors = np.load(self._data / "vectors.npy", mmap_mode="r")
        self._lines = open_file(self._data / "passages.jsonl")
        self._words: Any = None
        self._clusters: Any = None

    @classmethod
    def open(cls, address: str) -> "FolderStore":
        """Open an index for reading; raise UserError if it is missing, damaged or of another version."""
        folder = Path(address).expanduser()
        for is_last in (False, True):
            manifest = read_index(folder)
            try:
                return cls(folder, manifest)
            except Exception as error:
                # A writer may have replaced the index after its manifest was read.
                if is_last or read_index(folder).generation == manifest.generation:
                    raise DamagedIndex(str(folder), str(error), manifest.arguments) from error
        raise AssertionError

    @classmethod
    def exists(cls, address: str) -> bool:
        """Return whether there is an index in this folder."""
        return (Path(address).expanduser() / INDEX).is_file()

    @classmethod
    def lock(cls, address: str) -> FolderLock:
        """Keep other writers away; raise UserError if there is one."""
        folder = Path(address).expanduser()
        if folder.is_file():
            raise UserError(f"`{folder}` is a file, not a folder", fix="choose another folder with `--out`")
        if (
            folder.is_dir()
            and not (folder / INDEX).exists()
            and any(not path.name.startswith((_LOCK, _STAGED, _DATA, ".work")) for path in folder.iterdir())
        ):
            raise UserError(f"`{folder}` is not empty and not an index", fix="choose another folder with `--out`")
        make_private(folder)
        return FolderLock.take(folder / _LOCK, doing="writing this index")

    @classmethod
    def write(
        cls, address: str, content: StoredPassages, manifest: IndexManifest, *, progress: ProgressListener
    ) -> IndexManifest:
        """Replace the content of an index, or create it. The old content stays until the new one is complete."""
        folder = Path(address).expanduser()
        with disk_full_as_user_error(folder, lambda: content.vectors.nbytes * 2), _native_errors():
            for leftover in folder.glob(f"{_STAGED}*"):
                shutil.rmtree(leftover)
            staged = folder / f"{_STAGED}{secrets.token_hex(4)}"
            staged.mkdir()
            _write_data(staged, content, manifest.language.value, progress)
            sync_tree(staged)
            files = {
                path.relative_to(staged).as_posix(): FileRecord(bytes=path.stat().st_size, sha256=sha256_file(path))
                for path in sorted(staged.rglob("*"))
                if path.is_file() and path.suffix != ".lock"
            }
            manifest = manifest.model_copy(update={"generation": _DATA + staged.name[len(_STAGED) :], "files": files})
            staged.rename(folder / manifest.generation)
            sync_folder(folder)
            write_index(folder, manifest)
        for old in folder.glob(f"{_DATA}*"):
            if old.name != manifest.generation:
                shutil.rmtree(old, ignore_errors=True)
        return manifest

    def search_words(self, words: Sequence[str], limit: int) -> Hits:
        """Return the passages with the highest BM25 score (k1 = 1.2, b = 0.75)."""
        tantivy, index, searcher = self._open_words()
        parts = []
        for word, number in Counter(words).items():
            query = tantivy.Query.term_query(index.schema, "words", word, "freq")
            parts.append((tantivy.Occur.Should, tantivy.Query.boost_query(query, number) if number > 1 else query))
        if not parts:
            return []
        with self._reading():
            hits = searcher.search(tantivy.Query.boolean_query(parts), min(limit, len(self._offsets)), count=False).hits
            numbers = searcher.fast_field_values("number", [address for _, address in hits])
            return [(int(number), float(score)) for number, (score, _) in zip(numbers, hits, strict=True)]

    def search_vectors(self, vector: np.ndarray, limit: int) -> Hits:
        """Return the passages with the highest cosine similarity."""
        limit = min(limit, len(self._vectors))
        if self._is_clustered():
            scores, numbers = self._open_clusters().search(vector[None].astype(np.float32), limit)
            return [(int(n), float(s)) for n, s in zip(numbers[0], scores[0], strict=True) if n >= 0]
        best_scores, best_numbers = np.empty(0, np.float32), np.empty(0, np.int64)
        for start in range(0, len(self._vectors), _SCAN_ROWS):
            scores = self._vectors[start : start + _SCAN_ROWS] @ vector
            best_scores = np.concatenate([best_scores, scores])
            best_numbers = np.concatenate([best_numbers, np.arange(start, start + len(scores))])
            if len(best_scores) > limit:
                kept = np.argpartition(-best_scores, limit - 1)[:limit]
                best_scores, best_numbers = best_scores[kept], best_numbers[kept]
        order = np.lexsort((best_numbers, -best_scores))
        return [(int(best_numbers[place]), float(best_scores[place])) for place in order]

    def passages(self, numbers: Sequence[int]) -> list[Passage]:
        """Return passages by number."""
        found = []
        with self._reading():
            for number in numbers:
                self._lines.seek(int(self._offsets[number]))
                found.append(parse_passage(self._lines.readline()))
        return found

    def num_passages_with(self, words: Sequence[str]) -> list[int]:
        """Return the number of passages that contain each word."""
        _, _, searcher = self._open_words()
        with self._reading():
            return [searcher.doc_freq("words", word) for word in words]

    def set_settings(self, settings: SearchSettings) -> None:
        """Replace the search settings; raise UserError if another process has replaced the index."""
        manifest = self.manifest.model_copy(update={"settings": settings})
        with self.lock(str(self.folder)):
            if read_index(self.folder).generation != manifest.generation:
                raise UserError(
                    "another process has replaced the index", where=str(self.folder), fix="run the command again"
                )
            write_index(self.folder, manifest)
        self.manifest = manifest

    def documents(self) -> list[IndexedDocument]:
        """Return the documents in the order of their passages."""
        with self._reading(), open_file(self._data / "documents.jsonl") as lines:
            return [IndexedDocument(**parse_json(line)) for line in lines]

    def keys(self) -> dict[bytes, int]:
        """Return the hash of each passage with its number."""
        keys = read_bytes(self._data / "keys.bin")
        return {keys[32 * number : 32 * number + 32]: number for number in range(len(keys) // 32)}

    def vectors(self, numbers: Sequence[int]) -> np.ndarray:
        """Return vectors by number."""
        return self._vectors[np.asarray(numbers, np.int64)]

    def close(self) -> None:
        """Close the files."""
        self._lines.close()

    def _check_files(self) -> None:
        """Raise ValueError if a file is missing or has changed."""
        for name, record in self.manifest.files.items():
            if (size := (self._data / name).stat().st_size) != record.bytes:
                raise ValueError(f"{name} has {size} bytes instead of {record.bytes}")
            if record.sha256 and sha256_once(self._data / name) != record.sha256:
                raise ValueError(f"{name} has changed since it was written")

    @contextmanager
    def _reading(self) -> Generator[None, None, None]:
        """Raise DamagedIndex for any error of a reader. Without hashes, damage shows only there."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":  # of tantivy
                raise DamagedIndex(str(self.folder), f"{error}"[:200], self.manifest.arguments) from None
            raise

    def _open_words(self) -> tuple[Any, Any, Any]:
        tantivy = import_optional("tantivy", extra="retrieval", purpose="searching an index")
        if self._words is None:
            with self._reading():
                index = tantivy.Index.open(str(self._data / "words"))
                self._words = (index, index.searcher())
        return tantivy, *self._words

    def _is_clustered(self) -> bool:
        return "clusters.faiss" in self.manifest.files

    def _open_clusters(self) -> Any:
        faiss = import_optional("faiss", extra="retrieval", purpose="searching a large index")
        if self._clusters is None:
            # Mapped without copies. The lists of `IO_FLAG_MMAP` take 2.2 to 4 times as long (100,000 passages).
            mapped = getattr(faiss, "IO_FLAG_MMAP_IFC", faiss.IO_FLAG_MMAP)
            with self._reading():
                self._clusters = faiss.read_index(str(self._data / "clusters.faiss"), mapped)
        return self._clusters


def _write_data(folder: Path, content: StoredPassages, language: str, progress: ProgressListener) -> None:
    tantivy = import_optional("tantivy", extra="retrieval", purpose="an index")
    builder = tantivy.SchemaBuilder()
    builder.add_text_field("words", stored=False, tokenizer_name="whitespace", index_option="freq")
    builder.add_unsigned_field("number", stored=False, fast=True)
    (folder / "words").mkdir()
    index = tantivy.Index(builder.build(), path=str(folder / "words"))
    # One thread keeps the order of passages, and with it the scores of ties, the same in every run.
    writer = index.writer(heap_size=128_000_000, num_threads=1)
    offsets = np.zeros(len(content), np.int64)
    with open_file(folder / "passages.jsonl", "wb") as lines, open_file(folder / "keys.bin", "wb") as keys:
        for number, passage in enumerate(content.passages()):
            offsets[number] = lines.tell()
            lines.write(json_line(passage) + b"\n")
            keys.write(bytes.fromhex(passage.key))
            document = tantivy.Document()
            document.add_text("words", " ".join(words(passage.searched, language)))
            document.add_unsigned("number", number)
            writer.add_document(document)
            if number % 1000 == 0:
                progress(Progress("writing the index", number, len(content), "passages"))
    with open_file(folder / "documents.jsonl", "wb") as lines:
        lines.writelines(json_line(entry) + b"\n" for entry in content.documents)
    writer.commit()
    writer.wait_merging_threads()
    np.save(folder / "offsets.npy", offsets)
    np.save(folder / "vectors.npy", content.vectors)
    if len(content) > EXACT_PASSAGES:
        _write_clusters(folder / "clusters.faiss", content.vectors, progress)


def _write_clusters(path: Path, vectors: np.ndarray, progress: ProgressListener) -> None:
    """Assign the vectors to clusters, so that a search reads only the nearest ones."""
    faiss = import_optional("faiss", extra="retrieval", purpose="an index of this size")
    num_clusters = int(4 * len(vectors) ** 0.5)
    progress(Progress("clustering the vectors", 0, len(vectors), "passages"))
    quantizer = faiss.IndexFlatIP(vectors.shape[1])
    index = faiss.IndexIVFFlat(quantizer, vectors.shape[1], num_clusters, faiss.METRIC_INNER_PRODUCT)
    index.cp.niter, index.cp.seed = 10, 0
    sample = np.random.default_rng(0).choice(len(vectors), min(len(vectors), 64 * num_clusters), replace=False)
    index.train(np.ascontiguousarray(vectors[np.sort(sample)]))
    for start in range(0, len(vectors), 65_536):
        index.add(np.ascontiguousarray(vectors[start : start + 65_536]))
        progress(Progress("clustering the vectors", start, len(vectors), "passages"))
    _choose_num_probed(index, vectors)
    faiss.write_index(index, str(path))


def _choose_num_probed(index: Any, vectors: np.ndarray) -> None:
    """Set `nprobe`, which is stored with the clusters. Queries are passages with as much noise as signal."""
    chance = np.random.default_rng(0)
    chosen = vectors[np.sort(chance.choice(len(vectors), min(_MEASURED_QUERIES, len(vectors)), replace=False))]
    noise = chance.standard_normal(chosen.shape, np.float32)
    queries = chosen + noise / np.linalg.norm(noise, axis=1, keepdims=True)
    index.nprobe = index.nlist
    exact = index.search(queries, _NEAREST)[1]
    for number in sorted({max(_MIN_PROBED, round(index.nlist * 2 ** (-half / 2))) for half in range(20)}):
        index.nprobe = number
        found = index.search(queries, _NEAREST)[1]
        if np.mean([np.isin(own, wanted).mean() for own, wanted in zip(found, exact, strict=True)]) >= _RECALL:
            return


@contextmanager
def _native_errors() -> Generator[None, None, None]:
    """Raise OSError for errors of the disk that tantivy and faiss report as texts."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if found := _OS_ERROR.search(str(error)):
            number = int(found[1]) if found[1] else errno.ENOSPC
            raise OSError(number, os.strerror(number)) from error
        raise
