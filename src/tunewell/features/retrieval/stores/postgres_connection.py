"""Connections to a PostgreSQL database: addresses without passwords, locks, the extension pgvector, plain errors."""

import os
import re
import socket
from collections.abc import Generator
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.optional import import_optional
from tunewell.features.retrieval.records import IndexManifest
from tunewell.features.retrieval.stores.base import shown_address

_DEFAULT_NAME = "default"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,40}")
_CONNECT_SECONDS = 10


class DatabaseAddress:
    """A parsed address. `shown` has no password."""

    def __init__(self, address: str) -> None:
        self.server, _, name = address.partition("#")
        self.shown = shown_address(address)
        self.name = name or _DEFAULT_NAME
        if not _NAME.fullmatch(self.name):
            raise UserError(
                "the name of an index must have at most 40 letters, digits, `_`, `-` and `.`",
                where=self.shown,
                fix="change the name at the end of the address: `postgresql://USER@HOST/DATABASE#NAME`",
            )

    def schema(self, manifest: IndexManifest) -> str:
        """Return the schema with the content of a generation."""
        return f"tunewell {self.name} {manifest.generation}"


def psycopg_module() -> Any:
    return import_optional("psycopg", extra="postgres", purpose="an index in PostgreSQL")


def connect(address: DatabaseAddress) -> Any:
    psycopg = psycopg_module()
    try:
        values = psycopg.conninfo.conninfo_to_dict(address.server)
    except psycopg.ProgrammingError:
        # The message of the library may quote a part of the password.
        raise UserError(
            f"`{address.shown}` is not the address of a database",
            fix="write `postgresql://USER@HOST/DATABASE#NAME`, with special characters as `%XX`",
        ) from None
    values = {
        "connect_timeout": _CONNECT_SECONDS,
        "application_name": f"tunewell on {socket.gethostname()}, process {os.getpid()}"[:63],
    } | values
    try:
        return psycopg.connect(**values, autocommit=True, client_encoding="utf8")
    except psycopg.OperationalError as error:
        secret = str(values.get("password") or "")
        detail = str(error).strip().splitlines()[-1]
        raise UserError(
            f"cannot connect to the PostgreSQL server of `{address.shown}`",
            where=detail.replace(secret, "...") if secret else detail,
            fix="check that the server runs, and the address; a password is read from PGPASSWORD or ~/.pgpass",
        ) from None


_OLD_IS_UNCHANGED = "the old index is unchanged"
_PROBLEMS = (
    (
        "InsufficientPrivilege",
        "the database refuses access",
        "ask its owner for `GRANT CREATE ON DATABASE`, or use another user",
    ),
    (
        "DiskFull",
        "the disk of the database server is full",
        f"free space there and run the command again; {_OLD_IS_UNCHANGED}",
    ),
    (
        "OperationalError",
        "the connection to the database was lost",
        f"run the command again: {_OLD_IS_UNCHANGED}, and finished vectors are not computed again",
    ),
    ("Error", "the database reports an error", f"the log of the server has the details; {_OLD_IS_UNCHANGED}"),
)
"""Classes of `psycopg.errors`, what happened, and what to do. The first class that fits counts."""


@contextmanager
def as_user_errors(address: DatabaseAddress) -> Generator[None, None, None]:
    """Raise UserError for every error of the database."""
    psycopg = psycopg_module()
    try:
        yield
    except psycopg.errors.UndefinedTable as error:
        what, where = f"the index `{address.shown}` is damaged or was replaced", _message(error)
        raise UserError(what, where=where, fix="run the command again, or create the index again") from error
    except psycopg.Error as error:
        what, fix = next(rest for name, *rest in _PROBLEMS if isinstance(error, getattr(psycopg.errors, name)))
        raise UserError(f"{what}: {_message(error)}", where=address.shown, fix=fix) from error


def _message(error: Any) -> str:
    return str(error.diag.message_primary or error).strip().splitlines()[0] if str(error) else type(error).__name__


def lock_number(text: str) -> int:
    return int.from_bytes(sha256(f"tunewell {text}".encode()).digest()[:8], "big", signed=True)


def lock_writer(connection: Any, address: DatabaseAddress) -> None:
    """Take the lock of writers, which ends with the connection; raise UserError with the owner if it is taken."""
    number = lock_number(f"write {address.name}")
    if connection.execute("SELECT pg_try_advisory_lock(%s)", (number,)).fetchone()[0]:
        return
    owner = connection.execute(
        "SELECT application_name, backend_start::timestamp(0) FROM pg_locks JOIN pg_stat_activity USING (pid) "
        "WHERE locktype = 'advisory' AND granted AND (classid::int8 << 32) | objid::int8 = %s",
        (number,),
    ).fetchone()
    raise UserError(
        "another process is writing this index",
        where=f"{address.shown}: {owner[0]}, since {owner[1]}" if owner else address.shown,
        fix="wait until that process ends, or stop it",
    )


def pgvector_schema(connection: Any) -> str | None:
    query = "SELECT nspname FROM pg_extension JOIN pg_namespace n ON extnamespace = n.oid WHERE extname = 'vector'"
    row = connection.execute(query).fetchone()
    return row[0] if row else None


def require_pgvector(connection: Any, address: DatabaseAddress) -> str:
    """Return the schema of the extension, which is created if it is installed; raise UserError if it is not."""
    if (schema := pgvector_schema(connection)) is not None:
        return schema
    available = connection.execute("SELECT 1 FROM pg_available_extensions WHERE name = 'vector'").fetchone()
    if available is None:
        raise UserError(
            "the PostgreSQL server does not have the extension pgvector",
            where=address.shown,
            fix="install it on the server (package `postgresql-NN-pgvector`), or use a folder",
        )
    try:
        connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
    except psycopg_module().errors.InsufficientPrivilege as error:
        raise UserError(
            "pgvector is installed on the server, but not switched on in this database",
            where=address.shown,
            fix="ask an administrator to run `CREATE EXTENSION vector` in it",
        ) from error
    return pgvector_schema(connection) or "public"
