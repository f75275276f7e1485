"""An index in a PostgreSQL database with pgvector: `postgresql://USER@HOST/DATABASE#NAME`.

tunewell.indexes            one row per index: its generation and its manifest
"tunewell NAME 1f03ab9c"    a schema with the content of one generation
    passages                number, hash of the searched text, passage as JSON
    vectors                 number, embedding
    postings                word, and the passages with it: one row per word and block of passages
    documents               name and SHA-256 of each document, as JSON

One transaction writes a generation and points `tunewell.indexes` at it, so a reader finds the old or the new content.
A reader holds a shared lock on its generation; a writer drops the old generations that nobody reads.
"""

import json
import secrets
import weakref
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from math import log
from typing import Any

import numpy as np

from tunewell.core.errors import UserError
from tunewell.core.progress import Progress, ProgressListener
from tunewell.data.reading_prompt import Passage
from tunewell.features.retrieval.records import DamagedIndex, IndexManifest, SearchSettings
from tunewell.features.retrieval.stores.base import Hits, IndexedDocument, StoredPassages, json_line, parse_passage
from tunewell.features.retrieval.stores.postgres_connection import (
    DatabaseAddress,
    as_user_errors,
    connect,
    lock_number,
    lock_writer,
    pgvector_schema,
    psycopg_module,
    require_pgvector,
)
from tunewell.features.retrieval.words import words
from tunewell.records.base import parse_record

EXACT_PASSAGES = 100_000
"""Up to this number, all vectors are compared. Above it, pgvector's HNSW index is searched.

Measured with 60,000 vectors of 256 dimensions: 95 ms exactly, 80 ms with the index, which finds 98% of the ten nearest.
"""
_HNSW = "m = 24, ef_construction = 100"
"""With pgvector's defaults (16 and 64), 90% were found among 100,000."""
_EF_SEARCH = 400
"""Candidates that a search of the HNSW index keeps. More results than this are searched exactly."""
_MAX_INDEXED_DIMENSIONS = 2000
"""Limit of pgvector's HNSW index, and of a row that is stored without compression."""
_K1, _B = 1.2, 0.75
_BLOCK = 16_384
_MAX_INT2 = 32_767
_SETUP = """
CREATE SCHEMA IF NOT EXISTS tunewell;
CREATE TABLE IF NOT EXISTS tunewell.indexes (
    name text PRIMARY KEY, generation text NOT NULL, manifest text NOT NULL, mean_words float8 NOT NULL
)"""
_TABLES = """
CREATE TABLE passages (number int4 PRIMARY KEY, key bytea NOT NULL, passage text NOT NULL);
CREATE TABLE vectors (number int4 PRIMARY KEY, embedding vector({dimension}) NOT NULL);
CREATE TABLE postings (word text, num_passages int4, numbers int4[], frequencies int2[], lengths int2[]);
CREATE TABLE documents (number int4 PRIMARY KEY, document text NOT NULL)"""
_TYPES = {
    "passages": ["int4", "bytea", "bytea"],
    "vectors": ["int4", "bytea"],
    "postings": ["text", "int4", "int4[]", "int2[]", "int2[]"],
    "documents": ["int4", "bytea"],
}
"""The types of the columns for psycopg; `bytea` is also for what is in PostgreSQL's binary format already."""
_BM25 = f"""
SELECT one.number, sum(
    weight * one.frequency / (one.frequency + ({_K1 * (1 - _B)}::float8 + %(per_word)s::float8 * one.length))
) AS score
FROM unnest(%(words)s::text[], %(weights)s::float8[]) AS asked (word, weight) JOIN postings USING (word),
    unnest(numbers, frequencies, lengths) AS one (number, frequency, length)
GROUP BY one.number ORDER BY score DESC, one.number LIMIT %(limit)s"""
"""All numbers are float8: PostgreSQL's exact decimals would take several times as long."""


class PostgresStore:
    """An index in a database, open for reading."""

    def __init__(self, address: DatabaseAddress) -> None:
        self._address = address
        self._connection = connection = connect(address)
        weakref.finalize(self, connection.close)
        while True:
            found = _read_row(connection, address)
            if found is None:
                raise UserError(
                    f"there is no index in `{address.shown}`",
                    fix=f"create it with `tunewell index DOCUMENTS --out {address.shown}`",
                )
            self.manifest, self._mean_words = found
            self._use_generation()
            # A writer may have replaced the index before its generation was locked.
            if found == _read_row(connection, address):
                return

    @classmethod
    def open(cls, address: str) -> "PostgresStore":
        """Open an index for reading; raise UserError if it is missing, damaged or of another version."""
        parsed = DatabaseAddress(address)
        with as_user_errors(parsed):
            return cls(parsed)

    @classmethod
    def exists(cls, address: str) -> bool:
        """Return whether the database has an index of this name."""
        parsed = DatabaseAddress(address)
        with as_user_errors(parsed), connect(parsed) as connection:
            return _read_row(connection, parsed) is not None

    @classmethod
    @contextmanager
    def lock(cls, address: str) -> Generator[None, None, None]:
        """Keep other writers away; raise UserError if there is one."""
        parsed = DatabaseAddress(address)
        with as_user_errors(parsed):
            connection = connect(parsed)
        try:
            with as_user_errors(parsed):
                require_pgvector(connection, parsed)
                lock_writer(connection, parsed)
            yield
        finally:
            connection.close()

    @classmethod
    def write(
        cls, address: str, content: StoredPassages, manifest: IndexManifest, *, progress: ProgressListener
    ) -> IndexManifest:
        """Replace the content of an index, or create it. The old content stays until the new one is complete."""
        parsed = DatabaseAddress(address)
        manifest = manifest.model_copy(update={"generation": secrets.token_hex(4), "files": {}})
        with as_user_errors(parsed), connect(parsed) as connection:
            schema = require_pgvector(connection, parsed)
            with connection.transaction():
                connection.execute("SELECT pg_advisory_xact_lock(%s)", (lock_number("setup"),))
                connection.execute(_SETUP)
            with connection.transaction():
                connection.execute(f'CREATE SCHEMA "{parsed.schema(manifest)}"')
                connection.execute(f'SET LOCAL search_path TO "{parsed.schema(manifest)}", "{schema}"')
                mean_words = _write_tables(connection, content, manifest, progress)
                connection.execute(
                    "INSERT INTO tunewell.indexes VALUES (%s, %s, %s, %s) ON CONFLICT (name) DO UPDATE SET "
                    "generation = excluded.generation, manifest = excluded.manifest, mean_words = excluded.mean_words",
                    (parsed.name, manifest.generation, json.dumps(manifest.model_dump(mode="json")), mean_words),
                )
            _drop_unused(connection, parsed, keep=parsed.schema(manifest))
        return manifest

    def search_words(self, words: Sequence[str], limit: int) -> Hits:
        """Return the passages with the highest BM25 score (k1 = 1.2, b = 0.75)."""
        times, total = Counter(words), self.manifest.counts.passages
        weights = {
            word: times[word] * (_K1 + 1) * log(1 + (total - number + 0.5) / (number + 0.5))
            for word, number in zip(times, self.num_passages_with(list(times)), strict=True)
            if number
        }
        values = {
            "words": list(weights),
            "weights": list(weights.values()),
            "per_word": _K1 * _B / (self._mean_words or 1.0),
            "limit": limit,
        }
        return [(number, float(score)) for number, score in self._rows(_BM25, values)] if weights else []

    def search_vectors(self, vector: np.ndarray, limit: int) -> Hits:
        """Return the passages with the highest cosine similarity."""
        distance = "(embedding <#> %(vector)s::vector)"
        # `+ 0` keeps PostgreSQL from using the HNSW index, which finds no more than `_EF_SEARCH` passages.
        order = f"{distance} + 0, number" if limit > _EF_SEARCH else distance
        query = f"SELECT number, {distance} FROM vectors ORDER BY {order} LIMIT %(limit)s"
        values = {"vector": str(vector.tolist()), "limit": limit}
        hits = [(number, -float(negative)) for number, negative in self._rows(query, values)]
        return sorted(hits, key=lambda hit: (-hit[1], hit[0]))

    def passages(self, numbers: Sequence[int]) -> list[Passage]:
        """Return passages by number."""
        wanted = list(map(int, numbers))
        found = dict(self._rows("SELECT number, passage FROM passages WHERE number = ANY(%s)", (wanted,)))
        try:
            return [parse_passage(found[number]) for number in wanted]
        except KeyError as error:
            raise DamagedIndex(self._address.shown, f"passage {error} is missing") from None

    def documents(self) -> list[IndexedDocument]:
        """Return the documents in the order of their passages."""
        rows = self._rows("SELECT document FROM documents ORDER BY number")
        return [IndexedDocument(**json.loads(line)) for (line,) in rows]

    def keys(self) -> dict[bytes, int]:
        """Return the hash of each passage with its number."""
        return {bytes(key): number for number, key in self._rows("SELECT number, key FROM passages")}

    def vectors(self, numbers: Sequence[int]) -> np.ndarray:
        """Return vectors by number."""
        wanted = list(map(int, numbers))
        found = dict(self._rows("SELECT number, embedding FROM vectors WHERE number = ANY(%s)", (wanted,), binary=True))
        if missing := [number for number in wanted if number not in found]:
            raise DamagedIndex(self._address.shown, f"vector {missing[0]} is missing")
        return np.stack([np.frombuffer(found[number], ">f4", offset=4) for number in wanted]).astype(np.float32)

    def num_passages_with(self, words: Sequence[str]) -> list[int]:
        """Return the number of passages that contain each word."""
        query = "SELECT word, sum(num_passages) FROM postings WHERE word = ANY(%s) GROUP BY word"
        found = dict(self._rows(query, (list(words),)))
        return [int(found.get(word, 0)) for word in words]

    def set_settings(self, settings: SearchSettings) -> None:
        """Replace the search settings; raise UserError if the index was replaced since it was opened."""
        manifest = self.manifest.model_copy(update={"settings": settings})
        with as_user_errors(self._address), connect(self._address) as connection:
            lock_writer(connection, self._address)
            done = connection.execute(
                "UPDATE tunewell.indexes SET manifest = %s WHERE name = %s AND generation = %s",
                (json.dumps(manifest.model_dump(mode="json")), self._address.name, manifest.generation),
            )
            if done.rowcount != 1:
                raise UserError(
                    "another process has replaced the index", where=self._address.shown, fix="run the command again"
                )
        self.manifest = manifest

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _use_generation(self) -> None:
        """Find the tables of the generation by their names, and keep it from being dropped."""
        schema = self._address.schema(self.manifest)
        self._connection.execute("SELECT pg_advisory_lock_shared(%s)", (lock_number(schema),))
        extension = pgvector_schema(self._connection) or "public"
        self._connection.execute(f'SET search_path TO "{schema}", "{extension}"')
        self._connection.execute(f"SET hnsw.ef_search = {_EF_SEARCH}")

    def _rows(self, query: str, values: Any = (), *, binary: bool = False) -> list[Any]:
        psycopg = psycopg_module()
        with as_user_errors(self._address):
            try:
                return self._connection.execute(query, values, binary=binary).fetchall()
            except psycopg.OperationalError:
                if not self._connection.closed:
                    raise
            # The server was restarted, or closed an idle connection.
            self._connection = connect(self._address)
            weakref.finalize(self, self._connection.close)
            self._use_generation()
            return self._connection.execute(query, values, binary=binary).fetchall()


def _read_row(connection: Any, address: DatabaseAddress) -> tuple[IndexManifest, float] | None:
    if connection.execute("SELECT to_regclass('tunewell.indexes')").fetchone()[0] is None:
        return None
    query = "SELECT manifest, mean_words FROM tunewell.indexes WHERE name = %s"
    row = connection.execute(query, (address.name,)).fetchone()
    return None if row is None else (parse_record(row[0], IndexManifest, address.shown), row[1])


def _write_tables(
    connection: Any, content: StoredPassages, manifest: IndexManifest, progress: ProgressListener
) -> float:
    """Fill the tables of a new generation; return the mean number of words of a passage."""
    dimension, num_words = content.vectors.shape[1], 0
    connection.execute(_TABLES.format(dimension=dimension))
    is_small = dimension < _MAX_INDEXED_DIMENSIONS
    if is_small:
        # In the row itself instead of a side table, a scan of all vectors is several times as fast.
        connection.execute("ALTER TABLE vectors ALTER COLUMN embedding SET STORAGE PLAIN")
    passages = content.passages()
    for start in range(0, len(content), _BLOCK):
        progress(Progress("writing the index", start, len(content), "passages"))
        block = list(islice(passages, _BLOCK))
        rows = ((number, bytes.fromhex(one.key), json_line(one)) for number, one in enumerate(block, start))
        _copy(connection, "passages", rows)
        vectors = content.vectors[start : start + len(block)].astype(">f4")
        head = np.array([dimension, 0], ">i2").tobytes()  # of a vector in pgvector's binary format
        rows = ((number, head + one.tobytes()) for number, one in enumerate(vectors, start))
        _copy(connection, "vectors", rows)
        found = [words(one.searched, manifest.language.value) for one in block]
        num_words += sum(map(len, found))
        _copy(connection, "postings", _postings(found, start))
    rows = ((number, json_line(one)) for number, one in enumerate(content.documents))
    _copy(connection, "documents", rows)
    connection.execute("CREATE INDEX ON postings (word)")
    if is_small and len(content) > EXACT_PASSAGES:
        progress(Progress("indexing the vectors", 0, len(content), "passages"))
        connection.execute("SET LOCAL maintenance_work_mem = '1GB'")
        connection.execute(f"CREATE INDEX ON vectors USING hnsw (embedding vector_ip_ops) WITH ({_HNSW})")
    connection.execute("ANALYZE passages, vectors, postings")
    return num_words / max(1, len(content))


def _postings(found: list[list[str]], start: int) -> Iterator[tuple[Any, ...]]:
    """Yield one row per word of a block of passages."""
    postings: dict[str, list[tuple[int, int, int]]] = {}
    for number, one in enumerate(found, start):
        for word, times in Counter(one).items():
            postings.setdefault(word, []).append((number, min(times, _MAX_INT2), min(len(one), _MAX_INT2)))
    for word, rows in postings.items():
        yield word, len(rows), *map(list, zip(*rows, strict=True))


def _drop_unused(connection: Any, address: DatabaseAddress, *, keep: str) -> None:
    """Drop the old generations of an index, except those that a reader holds."""
    query = "SELECT nspname FROM pg_namespace WHERE starts_with(nspname, %s) AND nspname <> %s"
    for (schema,) in connection.execute(query, (f"tunewell {address.name} ", keep)).fetchall():
        number = (lock_number(schema),)
        if connection.execute("SELECT pg_try_advisory_lock(%s)", number).fetchone()[0]:
            connection.execute(f'DROP SCHEMA "{schema}" CASCADE')
            connection.execute("SELECT pg_advisory_unlock(%s)", number)


def _copy(connection: Any, table: str, rows: Iterable[tuple[Any, ...]]) -> None:
    """Send rows in PostgreSQL's binary format: several times as fast as text, and without rounding."""
    with connection.cursor().copy(f"COPY {table} FROM STDIN (FORMAT binary)") as copy:
        copy.set_types(_TYPES[table])
        for row in rows:
            copy.write_row(row)
