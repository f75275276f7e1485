"""An index in PostgreSQL: the same results as in a folder, and the old index after every failure."""

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fault_points import Killed
from postgres_server import PostgresServer
from sample_files import write_pages
from test_indexing import content_of
from tiny_embedder import write_tiny_embedder
from toy_embedder import ToyEmbedder

from forked import in_child, run_command
from tunewell.core.errors import UserError
from tunewell.features.retrieval.indexing import ComputedVectors, build_index
from tunewell.features.retrieval.search import Retriever
from tunewell.features.retrieval.stores import postgres
from tunewell.features.retrieval.stores.base import open_store, store_class
from tunewell.features.retrieval.words import words


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    started = PostgresServer()
    yield started
    started.remove()


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch) -> None:
    """Work folders of indexes that are not folders lie in the cache."""
    monkeypatch.setenv("TUNEWELL_CACHE", str(tmp_path_factory.mktemp("cache")))


def change(docs: Path) -> None:
    (docs / "page-0001.md").write_text("# Page 1\n\nAnother text.\n\n## More\n\nmore")
    (docs / "page-0099.md").write_text("# New\n\nnew \x00 text with \\ and \t and ' and 漢字")
    (docs / "page-0000.md").unlink(missing_ok=True)


def test_an_index_in_postgres_equals_the_folder(server, tmp_path):
    """Other words, numbers or scores would make answers depend on where the index lies."""
    docs, folder, address = write_pages(tmp_path / "docs", 40), str(tmp_path / "index"), server.address("equal")
    for _ in range(2):
        by_folder = build_index([str(docs)], folder, ToyEmbedder()).manifest
        by_server = build_index([str(docs)], address, ToyEmbedder()).manifest
        assert by_server.counts == by_folder.counts
        one, two = open_store(folder), open_store(address)
        numbers = list(range(by_folder.counts.passages))
        assert one.passages(numbers) == two.passages(numbers)
        assert one.documents() == two.documents()
        assert one.keys() == two.keys()
        assert np.array_equal(one.vectors(numbers[::-1]), two.vectors(numbers[::-1]))
        asked = words("the code word of page 17 is what, page?", "english")
        assert one.num_passages_with(asked) == two.num_passages_with(asked)
        for limit in (5, 1_000):
            for first, second in (
                (one.search_words(asked, limit), two.search_words(asked, limit)),
                (one.search_vectors(one.vectors([3])[0], limit), two.search_vectors(one.vectors([3])[0], limit)),
            ):
                assert len(first) == len(second)
                assert np.allclose([score for _, score in first], [score for _, score in second], rtol=2e-3, atol=1e-5)
                assert first[0][0] == second[0][0]
        assert two.search_words([], 5) == two.search_words(["nothing"], 5) == []
        two.close()
        change(docs)
    assert len(server.schemas("equal")) == 1


def test_a_second_writer_is_refused_and_named(server, tmp_path):
    """Two writers would each drop the other's tables."""
    docs, address = write_pages(tmp_path / "docs", 2), server.address("locked")

    def refused() -> None:
        with pytest.raises(UserError, match="another process is writing this index") as caught:
            build_index([str(docs)], address, ToyEmbedder())
        assert f"process {os.getppid()}, since" in (caught.value.where or "")

    with store_class(address).lock(address):
        assert in_child(refused) == 0
        build_index([str(docs)], server.address("other"), ToyEmbedder())
    build_index([str(docs)], address, ToyEmbedder())
    with pytest.raises(UserError, match="embedder `toy`, not with `two`"):
        build_index([str(docs)], address, ToyEmbedder("two"))


def test_a_reader_keeps_its_content_and_its_connection(server, tmp_path):
    """A server answers for weeks, while others write the index and the database is restarted."""
    docs, address = write_pages(tmp_path / "docs", 6), server.address("read")
    build_index([str(docs)], address, ToyEmbedder())
    store = open_store(address)
    reader = Retriever(store, ToyEmbedder())
    before = reader.search("code word of page 3", 3)
    change(docs)
    build_index([str(docs)], address, ToyEmbedder())
    assert len(server.schemas("read")) == 2
    assert reader.search("code word of page 3", 3) == before
    server.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'tunewell%'")
    assert reader.search("code word of page 3", 3) == before
    with pytest.raises(UserError, match="another process has replaced the index"):
        store.set_settings(store.manifest.settings)
    store.close()
    build_index([str(docs)], address, ToyEmbedder())
    assert len(server.schemas("read")) == 1
    new = open_store(address)
    settings = new.manifest.settings
    new.set_settings(settings.model_copy(update={"refusal": replace(settings.refusal, value=[1.0])}))
    assert open_store(address).manifest.settings.refusal.value == [1.0]


STATEMENTS = ("execute", "copy")


def count_statements(at: int, act: Any) -> list[int]:
    """Call `act` before the statement of that number on any connection; return a list that grows with each."""
    import psycopg

    done: list[int] = []

    def counting(original: Any) -> Any:
        def call(self: Any, *arguments: Any, **options: Any) -> Any:
            done.append(1)
            if len(done) == at + 1:
                act(self)
            return original(self, *arguments, **options)

        return call

    for name in STATEMENTS:
        setattr(psycopg.Cursor, name, counting(getattr(psycopg.Cursor, name)))
    return done


def raise_killed(_: object) -> None:
    raise Killed


def stopped_everywhere(server: PostgresServer, tmp_path: Path, *, step: int, kill: bool) -> None:
    """Stop an update at its statements; check what is left, and that the next run ends well."""
    import psycopg

    states: list[bool] = []
    for at in range(0, 1_000, step):
        address, docs = server.address(f"stop-{at}"), write_pages(tmp_path / f"docs-{at}", 6)
        build_index([str(docs)], address, ToyEmbedder())
        old = content_of(address)
        change(docs)
        embedder = ToyEmbedder()

        def act(at: int = at, address: str = address, docs: Path = docs, embedder: Any = embedder) -> None:
            end = (lambda _: os.kill(os.getpid(), signal.SIGKILL)) if kill else raise_killed
            count_statements(at, end)
            build_index([str(docs)], address, embedder)

        if kill:
            code = in_child(act)
        else:
            with pytest.MonkeyPatch.context() as patched:
                for name in STATEMENTS:  # put back at the end
                    patched.setattr(psycopg.Cursor, name, getattr(psycopg.Cursor, name))
                try:
                    act()
                    code = 0
                except Killed:
                    code = 1
        server.wait_for_rollback()
        found, again = content_of(address), ToyEmbedder()
        build_index([str(docs)], address, again)
        assert found in (old, content_of(address)), at
        assert not set(again.computed) & set(embedder.computed)
        assert len(server.schemas(f"stop-{at}")) == 1
        states.append(found == old)
        if code == 0:
            assert states[0] and not states[-1]
            assert len(states) > 20 // step
            return
    raise AssertionError("the index is never finished")


def test_a_stopped_update_leaves_the_old_index_or_the_new_one(server, tmp_path):
    """One statement in nine is the last one; finished vectors are not computed again."""
    stopped_everywhere(server, tmp_path, step=9, kill=False)


@pytest.mark.slow
def test_an_update_that_is_killed_at_any_statement_leaves_an_index(server, tmp_path):
    """SIGKILL before each statement: only the server can clean up."""
    stopped_everywhere(server, tmp_path, step=1, kill=True)


def test_a_server_that_crashes_in_the_middle_leaves_the_old_index(server, tmp_path):
    """The connection breaks while the passages are written."""
    docs, address = write_pages(tmp_path / "docs", 6), server.address("crash")
    build_index([str(docs)], address, ToyEmbedder())
    old = content_of(address)
    change(docs)
    embedder = ToyEmbedder()
    with pytest.MonkeyPatch.context() as patched:
        original = postgres._copy

        def copy(connection: Any, table: str, rows: Any) -> None:
            if table == "postings":
                server.stop()
            original(connection, table, rows)

        patched.setattr(postgres, "_copy", copy)
        with pytest.raises(UserError, match="connection to the database was lost") as caught:
            build_index([str(docs)], address, embedder)
    assert "old index is unchanged" in (caught.value.fix or "")
    for action in (open_store, lambda address: build_index([str(docs)], address, ToyEmbedder())):
        with pytest.raises(UserError, match="cannot connect to the PostgreSQL server") as caught:
            action(address)
        assert "check that the server runs" in (caught.value.fix or "")
    server.start()
    assert content_of(address) == old
    again = ToyEmbedder()
    build_index([str(docs)], address, again)
    assert embedder.computed and not again.computed


def test_problems_of_the_database_are_said_plainly(server, tmp_path):
    """No index, no rights, no pgvector, a full disk, a wrong name, a wrong address."""
    docs = write_pages(tmp_path / "docs", 2)
    server.execute("CREATE DATABASE plain", "CREATE ROLE guest LOGIN")
    with pytest.raises(UserError, match="there is no index in"):
        open_store(server.address("nothing"))
    guest = server.address(database="plain", user="guest")
    with pytest.raises(UserError, match=r"refuses|not switched on") as caught:
        build_index([str(docs)], guest, ToyEmbedder())
    assert "ask" in (caught.value.fix or "")
    with pytest.raises(UserError, match="letters, digits"):
        open_store(server.address("a b'c"))
    server.execute("ALTER DATABASE plain SET extension_control_path = '/nowhere'")
    with pytest.raises(UserError, match="does not have the extension pgvector"):
        build_index([str(docs)], server.address(database="plain"), ToyEmbedder())
    address = server.address("full")
    with pytest.MonkeyPatch.context() as patched:
        full = "DO $$ BEGIN RAISE EXCEPTION 'could not extend file' USING ERRCODE = '53100'; END $$"
        patched.setattr(postgres, "_TABLES", full)
        with pytest.raises(UserError, match="disk of the database server is full"):
            build_index([str(docs)], address, ToyEmbedder())
    with pytest.raises(UserError, match="there is no index in"):
        open_store(address)
    build_index([str(docs)], address, ToyEmbedder())
    server.execute(f'DROP TABLE "{server.schemas("full")[0]}".passages')
    with pytest.raises(UserError, match="damaged or was replaced"):
        open_store(address).passages([0])


SECRET = "Tr0ub4dor-and-3"


@pytest.mark.parametrize(
    "address",
    [
        f"postgresql://me:{SECRET}@127.0.0.1:1/db#fees",
        f"postgresql://me@127.0.0.1:1/db?password={SECRET}",
        f"postgresql://me:{SECRET}%zz@127.0.0.1/db",
        f"postgresql://me:{SECRET}@127.0.0.1:port/db",
        f"postgresql://me:{SECRET}@nowhere.invalid/db",
        f"postgresql://me@127.0.0.1/db?nonsense={SECRET}&password={SECRET}",
    ],
)
def test_no_error_shows_the_password(address, tmp_path, monkeypatch):
    """Errors are pasted into chats and bug reports."""
    docs = write_pages(tmp_path / "docs", 1)
    monkeypatch.setattr("tunewell.features.retrieval.stores.postgres_connection._CONNECT_SECONDS", 2)
    with pytest.raises(UserError) as caught:
        build_index([str(docs)], address, ToyEmbedder())
    told = f"{caught.value} {caught.value.__cause__} {caught.value.__suppress_context__}"
    assert SECRET not in told.replace(f"nonsense={SECRET}", "")


def test_the_password_is_in_no_file_and_on_no_screen(server, tmp_path):
    """The command prints the address, keeps a work folder for it and writes a manifest."""
    docs = write_pages(tmp_path / "docs", 3)
    address = server.address("secret").replace("postgres@", f"postgres:{SECRET}@")
    cache, embedder = Path(os.environ["TUNEWELL_CACHE"]), write_tiny_embedder(tmp_path / "embedder")
    for more in ([], ["--json"]):
        command = ["index", str(docs), "--store", address, "--embedder", str(embedder), *more]
        done = run_command(*command, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert SECRET not in done.stdout + done.stderr
        assert "#secret" in done.stdout
    (manifest,) = server.execute("SELECT manifest FROM tunewell.indexes WHERE name = 'secret'")
    assert SECRET not in manifest[0]
    found = subprocess.run(["grep", "-r", SECRET, str(tmp_path), str(cache)], capture_output=True)
    assert found.stdout == b""
    assert list((cache / "index").iterdir()) == []


def test_a_large_index_is_searched_with_hnsw(server, tmp_path, monkeypatch):
    """Above a size; more results than the index keeps candidates are searched exactly."""
    monkeypatch.setattr(postgres, "EXACT_PASSAGES", 200)
    docs, address = write_pages(tmp_path / "docs", 1), server.address("large")
    text = "\n".join(f"entry {number},w{number * 7919 % 1009} w{number * 31 % 97}" for number in range(600))
    (docs / "rows.csv").write_text(f"name,text\n{text}")
    build_index([str(docs)], address, ToyEmbedder())
    (schema,) = server.schemas("large")
    kinds = server.execute(f"SELECT indexdef FROM pg_indexes WHERE schemaname = '{schema}' AND tablename = 'vectors'")
    assert any("hnsw" in kind for (kind,) in kinds)
    store = open_store(address)
    vectors = store.vectors(range(601))
    shares = []
    for number in range(0, 600, 40):
        exact = np.argsort(-(vectors @ vectors[number]), kind="stable")[:10]
        scores = vectors[exact] @ vectors[number]
        found = [score for _, score in store.search_vectors(vectors[number], 10)]
        shares.append(np.mean(np.asarray(found) >= scores[-1] - 1e-5))
    assert np.mean(shares) >= 0.95
    assert len(store.search_vectors(vectors[0], 10_000)) == 601


def test_the_work_folder_is_found_again(server, tmp_path, monkeypatch):
    """An interrupted run goes on, also with another password in the address."""
    docs, address = write_pages(tmp_path / "docs", 6), server.address("work")
    first = ToyEmbedder(batch=1)
    original = ComputedVectors.append

    def append(*arguments: Any) -> None:
        if len(first.computed) == 4:
            raise Killed
        original(*arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ComputedVectors, "append", append)
        with pytest.raises(Killed):
            build_index([str(docs)], address, first)
    again = ToyEmbedder(batch=1)
    build_index([str(docs)], address.replace("postgres@", "postgres:other@"), again)
    assert len(again.computed) == 3
