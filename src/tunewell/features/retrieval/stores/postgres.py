"""An index in a PostgreSQL database: `postgresql://USER@HOST/DATABASE#NAME`.

The database keeps the files of an index folder. A reader copies those of the current generation into its cache, once,
and searches them like a folder.

tunewell.folders    one row per index: its generation and its manifest
tunewell.files      the files of each generation, in parts

One transaction writes a generation and points `tunewell.folders` at it, so a reader copies the old or the new content.
"""

import json
import re
import secrets
import shutil
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tunewell.core.cache import cache_folder
from tunewell.core.errors import UserError
from tunewell.core.files import disk_full_as_user_error, make_private, open_file, sha256_text
from tunewell.core.progress import Progress, ProgressListener
from tunewell.features.retrieval.records import DamagedIndex, IndexManifest, SearchSettings
from tunewell.features.retrieval.stores.base import StoredPassages
from tunewell.features.retrieval.stores.folder import FolderStore
from tunewell.features.retrieval.stores.postgres_connection import (
    DatabaseAddress,
    as_user_errors,
    connect,
    lock_number,
    lock_writer,
    psycopg_module,
)
from tunewell.records.base import parse_record

_PART_BYTES = 16 << 20
_KEPT_COPIES = 2
"""Generations in the cache: a reader may still use the last but one."""
_GENERATION = re.compile(r"data-[0-9a-f]{8}")
_SETUP = """
CREATE SCHEMA IF NOT EXISTS tunewell;
CREATE TABLE IF NOT EXISTS tunewell.folders (name text PRIMARY KEY, generation text NOT NULL, manifest text NOT NULL);
CREATE TABLE IF NOT EXISTS tunewell.files (
    name text, generation text, file text, part int4, data bytea NOT NULL, PRIMARY KEY (name, generation, file, part)
)"""


class PostgresStore(FolderStore):
    """An index in a database: a copy of its folder, open for reading."""

    _database: DatabaseAddress

    @classmethod
    def open(cls, address: str) -> "PostgresStore":
        """Open an index for reading; raise UserError if it is missing, damaged or of another version."""
        database = DatabaseAddress(address)
        with as_user_errors(database), connect(database) as connection:
            connection.isolation_level = psycopg_module().IsolationLevel.REPEATABLE_READ
            with connection.transaction():
                manifest = _read_row(connection, database)
                if manifest is None:
                    raise UserError(
                        f"there is no index in `{database.shown}`",
                        fix=f"create it with `tunewell index DOCUMENTS --out {database.shown}`",
                    )
                store = _open_copy(cls, connection, database, manifest)
        store.address, store._database = database.shown, database
        return store

    @classmethod
    def exists(cls, address: str) -> bool:
        """Return whether the database has an index of this name."""
        database = DatabaseAddress(address)
        with as_user_errors(database), connect(database) as connection:
            return _read_row(connection, database) is not None

    @classmethod
    @contextmanager
    def lock(cls, address: str) -> Generator[None, None, None]:
        """Keep other writers away; raise UserError if there is one."""
        database = DatabaseAddress(address)
        with as_user_errors(database):
            connection = connect(database)
        try:
            with as_user_errors(database):
                lock_writer(connection, database)
                with connection.transaction():
                    connection.execute("SELECT pg_advisory_xact_lock(%s)", (lock_number("setup"),))
                    connection.execute(_SETUP)
            yield
        finally:
            connection.close()

    @classmethod
    def write(
        cls, address: str, content: StoredPassages, manifest: IndexManifest, *, progress: ProgressListener
    ) -> IndexManifest:
        """Replace the content of an index, or create it. The old content stays until the new one is complete."""
        database = DatabaseAddress(address)
        folder = _copies(database)
        manifest = super().write(str(folder), content, manifest, progress=progress)
        with as_user_errors(database), connect(database) as connection, connection.transaction():
            with connection.cursor().copy("COPY tunewell.files FROM STDIN (FORMAT BINARY)") as copy:
                copy.set_types(["text", "text", "text", "int4", "bytea"])
                for number, name in enumerate(manifest.files):
                    progress(Progress("uploading the index", number, len(manifest.files), "files"))
                    for part, data in enumerate(_parts(folder / manifest.generation / name)):
                        copy.write_row((database.name, manifest.generation, name, part, data))
            connection.execute(
                "INSERT INTO tunewell.folders VALUES (%s, %s, %s) ON CONFLICT (name) DO UPDATE SET "
                "generation = excluded.generation, manifest = excluded.manifest",
                (database.name, manifest.generation, json.dumps(manifest.model_dump(mode="json"))),
            )
            old = "DELETE FROM tunewell.files WHERE name = %s AND generation <> %s"
            connection.execute(old, (database.name, manifest.generation))
        return manifest

    def set_settings(self, settings: SearchSettings) -> None:
        """Replace the search settings; raise UserError if the index was replaced since it was opened."""
        manifest, database = self.manifest.model_copy(update={"settings": settings}), self._database
        with as_user_errors(database), connect(database) as connection:
            lock_writer(connection, database)
            done = connection.execute(
                "UPDATE tunewell.folders SET manifest = %s WHERE name = %s AND generation = %s",
                (json.dumps(manifest.model_dump(mode="json")), database.name, manifest.generation),
            )
            if done.rowcount != 1:
                raise UserError(
                    "another process has replaced the index", where=database.shown, fix="run the command again"
                )
        self.manifest = manifest


def _read_row(connection: Any, database: DatabaseAddress) -> IndexManifest | None:
    if connection.execute("SELECT to_regclass('tunewell.folders')").fetchone()[0] is None:
        return None
    row = connection.execute("SELECT manifest FROM tunewell.folders WHERE name = %s", (database.name,)).fetchone()
    return None if row is None else parse_record(row[0], IndexManifest, database.shown)


def _copies(database: DatabaseAddress) -> Path:
    """Return the folder in the cache for the copies of an index."""
    cache = cache_folder("index-copies")
    if cache is None:
        raise UserError("the cache folder cannot be written", fix="set TUNEWELL_CACHE to a folder that can be written")
    folder = cache / sha256_text(database.shown)[:16]
    make_private(folder)
    return folder


def _parts(path: Path) -> Iterator[bytes]:
    with open_file(path) as file:
        while part := file.read(_PART_BYTES):
            yield part


def _open_copy(
    kind: type[PostgresStore], connection: Any, database: DatabaseAddress, manifest: IndexManifest
) -> PostgresStore:
    """Open the copy of a generation; a missing or damaged copy is made again."""
    folder = _copies(database)
    data = folder / manifest.generation
    is_plain = all(not Path(name).is_absolute() and ".." not in Path(name).parts for name in manifest.files)
    if not (is_plain and manifest.files and _GENERATION.fullmatch(manifest.generation)):
        raise DamagedIndex(database.shown, "its list of files is not valid", manifest.arguments)
    for is_last in (False, True):
        try:
            if not data.is_dir():
                _copy(connection, database, manifest, data)
            return kind(folder, manifest)
        except (OSError, ValueError) as error:
            shutil.rmtree(data, ignore_errors=True)
            if is_last:
                raise DamagedIndex(database.shown, str(error), manifest.arguments) from error
    raise AssertionError


def _copy(connection: Any, database: DatabaseAddress, manifest: IndexManifest, data: Path) -> None:
    staged = data.with_name(f".staged-{secrets.token_hex(4)}")
    query = "SELECT file, data FROM tunewell.files WHERE name = %s AND generation = %s ORDER BY file, part"
    with disk_full_as_user_error(data.parent, lambda: sum(record.bytes for record in manifest.files.values())):
        for name in manifest.files:
            (staged / name).parent.mkdir(parents=True, exist_ok=True)
            (staged / name).touch()
        for name, part in connection.cursor().stream(query, (database.name, manifest.generation), binary=True):
            if name in manifest.files:
                with open_file(staged / name, "ab") as file:
                    file.write(part)
    staged.rename(data)
    copies = sorted(data.parent.glob("data-*"), key=lambda copy: copy.stat().st_mtime)
    for old in copies[:-_KEPT_COPIES]:
        shutil.rmtree(old, ignore_errors=True)
