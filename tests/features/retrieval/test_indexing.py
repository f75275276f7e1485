"""Building an index: only what is new is embedded, and a failure at any moment leaves the old index."""

import errno
import io
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fault_points import Killed, failing
from sample_files import write_pages
from toy_embedder import ToyEmbedder

from forked import in_child
from tunewell.core.errors import UserError
from tunewell.features.retrieval.indexing import ComputedVectors, build_index
from tunewell.features.retrieval.search import Retriever
from tunewell.features.retrieval.stores.base import open_store, store_class

PLACES = [(os, "mkdir"), (os, "fsync"), (os, "rename"), (os, "replace"), (os, "unlink"), (os, "rmdir"), (io, "open")]
PLACES += [(np, "save"), (ComputedVectors, "append")]
"""Every kind of change to the disk that an index makes, except those inside tantivy."""


def content_of(address: str) -> tuple[Any, ...]:
    """Return all that a reader can see of an index."""
    store = open_store(address)
    numbers = range(store.manifest.counts.passages)
    found = Retriever(store, ToyEmbedder()).search("what is the code word of page 3", 5)
    content = (
        store.manifest.documents_sha256,
        store.passages(numbers),
        store.vectors(numbers).tobytes(),
        sorted(store.keys()),
        [(one.number, round(one.score, 6)) for one in found],
    )
    store.close()
    return content


def fails_everywhere(
    prepare: Callable[[int], tuple[str, Path]], places: list[tuple[Any, str]], *, first: int = 0, step: int = 1
) -> int:
    """Break an update of an index at each of its writes; check what is left, and that the next run ends well.

    `prepare` makes an old index and changed documents; it returns the address and the folder of the documents.
    """
    for at in range(first, 2_000, step):
        address, docs = prepare(at)
        old, embedder = content_of(address), ToyEmbedder()
        with failing(at, places, Killed) as touched, suppress(Killed):
            build_index([str(docs)], address, embedder)
        is_done = len(touched) <= at
        found = content_of(address)
        num_computed = len(embedder.computed)
        build_index([str(docs)], address, embedder)
        new = content_of(address)
        assert found in (old, new), at
        assert new != old
        # Only the batch in flight is computed again.
        assert len(embedder.computed) - len(set(embedder.computed)) <= 4, at
        assert num_computed <= len(embedder.computed)
        if is_done:
            assert found == new
            return at
    raise AssertionError("the index is never finished")


@pytest.fixture
def old_index(tmp_path: Path) -> Callable[[int], tuple[str, Path]]:
    """Makes an index of six pages, and then changes two of the pages, adds one and deletes one."""
    docs = write_pages(tmp_path / "docs", 6)
    build_index([str(docs)], str(tmp_path / "first"), ToyEmbedder())
    for index in (1, 3):
        (docs / f"page-{index:04}.md").write_text(f"# Page {index}\n\nAnother text of page {index}.\n\n## More\n\nmore")
    (docs / "page-0099.md").write_text("# New\n\nnew text")
    (docs / "page-0000.md").unlink()

    def prepare(at: int) -> tuple[str, Path]:
        address = tmp_path / f"index-{at}"
        shutil.copytree(tmp_path / "first", address)
        return str(address), docs

    return prepare


@pytest.mark.slow
def test_an_update_that_is_stopped_leaves_the_old_index_or_the_new_one(old_index):
    """Each write in turn is the last one of the process."""
    assert fails_everywhere(old_index, PLACES, step=6) > 30


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("first", range(1, 6))
def test_an_update_that_is_stopped_at_any_other_write_leaves_an_index(old_index, first):
    """The writes between those of the default tests."""
    assert fails_everywhere(old_index, PLACES, first=first, step=6) > 30


@pytest.mark.slow
def test_a_killed_process_leaves_the_old_index_or_the_new_one(old_index):
    """SIGKILL at many moments: nothing is flushed, no `finally` runs, tantivy's threads end in the middle."""
    states = set()
    for at in range(60):
        address, docs = old_index(at)
        old = content_of(address)

        def act(at: int = at, address: str = address, docs: Path = docs) -> None:
            calls = [0]

            def progress(_: object) -> None:
                calls[0] += 1
                if calls[0] == at // 2:
                    os.kill(os.getpid(), signal.SIGKILL)

            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            if at % 2:
                signal.setitimer(signal.ITIMER_REAL, at / 200)
            build_index([str(docs)], address, ToyEmbedder(), progress=progress)

        in_child(act)
        found = content_of(address)
        build_index([str(docs)], address, ToyEmbedder())
        assert found in (old, content_of(address))
        states.add(found == old)
    assert states == {True, False}


def test_only_changed_documents_are_read_and_embedded(tmp_path, monkeypatch):
    """One of 1,000 documents changed: embedding all again would take minutes."""
    docs = write_pages(tmp_path / "docs", 1_000)
    first = build_index([str(docs)], str(tmp_path / "index"), ToyEmbedder())
    assert first.manifest.counts.embedded == 1_000
    (docs / "page-0500.md").write_text("# Page 500\n\nA new text.\n")
    embedder = ToyEmbedder()
    monkeypatch.setattr(embedder, "count_tokens", Counted(embedder.count_tokens))
    second = build_index([str(docs)], str(tmp_path / "index"), embedder)
    assert second.manifest.counts.embedded == 1
    assert embedder.computed == ["Page 500\nA new text."]
    assert 0 < embedder.count_tokens.num_texts < 10
    assert second.manifest.counts.passages == 1_000
    again = build_index([str(docs)], str(tmp_path / "index"), ToyEmbedder())
    assert again.manifest.counts.embedded == 0
    assert again.manifest.documents_sha256 == second.manifest.documents_sha256


def test_documents_that_an_update_drops_are_named(tmp_path):
    """Guards `index more`, which was meant to add documents, and replaced those of the index without a word."""
    for name in ("old", "new"):
        write_pages(tmp_path / name, 2)
    build_index([str(tmp_path / "old")], str(tmp_path / "index"), ToyEmbedder())
    built = build_index([str(tmp_path / "new")], str(tmp_path / "index"), ToyEmbedder())
    [note] = built.notes
    assert "no longer in the index: 2 documents" in note and "old/page-0000.md" in note
    both = [str(tmp_path / "old"), str(tmp_path / "new")]
    assert build_index(both, str(tmp_path / "index"), ToyEmbedder()).notes == []


class Counted:
    """A token counter that counts the texts it gets."""

    def __init__(self, original: Callable[[list[str]], list[int]]) -> None:
        self._original, self.num_texts = original, 0

    def __call__(self, texts: list[str]) -> list[int]:
        self.num_texts += len(texts)
        return self._original(texts)


def test_an_update_equals_a_new_index(old_index, tmp_path):
    """Passages of deleted documents would answer questions for ever."""
    address, docs = old_index(0)
    build_index([str(docs)], address, ToyEmbedder())
    build_index([str(docs)], str(tmp_path / "fresh"), ToyEmbedder())
    assert content_of(address) == content_of(str(tmp_path / "fresh"))


def test_duplicates_come_back_when_the_first_copy_goes(tmp_path):
    """The passage of the second file was left out; with the first file gone it is the only one."""
    docs = tmp_path / "docs"
    docs.mkdir()
    for name in ("a.md", "b.md"):
        (docs / name).write_text("# Same\n\nsame text")
    counts = build_index([str(docs)], str(tmp_path / "index"), ToyEmbedder()).manifest.counts
    assert (counts.passages, counts.duplicates, counts.indexed) == (1, 1, 2)
    (docs / "a.md").unlink()
    counts = build_index([str(docs)], str(tmp_path / "index"), ToyEmbedder()).manifest.counts
    assert (counts.passages, counts.duplicates, counts.embedded) == (1, 0, 0)
    assert open_store(str(tmp_path / "index")).passages([0])[0].file.endswith("b.md")


def test_another_embedder_is_refused(tmp_path):
    """Vectors of two models cannot be compared; the search would return anything."""
    docs, index = write_pages(tmp_path / "docs", 2), str(tmp_path / "index")
    build_index([str(docs)], index, ToyEmbedder("one"))
    before = content_of(index)
    with pytest.raises(UserError, match="embedder `one`, not with `two`") as caught:
        build_index([str(docs)], index, ToyEmbedder("two"))
    assert "--embedder one" in (caught.value.fix or "")
    assert content_of(index) == before


def test_an_unknown_language_is_refused_before_anything_is_read(tmp_path):
    """The search library would fail after an hour of embedding."""
    docs = write_pages(tmp_path / "docs", 1)
    with pytest.raises(UserError, match="unknown language `klingon`"):
        build_index([str(docs)], str(tmp_path / "index"), ToyEmbedder(), language="klingon")
    assert not (tmp_path / "index").exists()


def test_settings_survive_an_update(tmp_path):
    """They were measured on questions; a changed page does not make them wrong."""
    docs, index = write_pages(tmp_path / "docs", 2), str(tmp_path / "index")
    build_index([str(docs)], index, ToyEmbedder())
    store = open_store(index)
    settings = store.manifest.settings
    changed = settings.model_copy(update={"num_passages": replace(settings.num_passages, value=7)})
    store.set_settings(changed)
    assert build_index([str(docs)], index, ToyEmbedder()).manifest.settings.num_passages.value == 7


def test_settings_of_a_replaced_index_are_refused(tmp_path):
    """The old manifest names data that is deleted: writing it again would break the index."""
    docs, index = write_pages(tmp_path / "docs", 2), str(tmp_path / "index")
    build_index([str(docs)], index, ToyEmbedder())
    store = open_store(index)
    (docs / "page-0001.md").write_text("# Other\n\ntext")
    build_index([str(docs)], index, ToyEmbedder())
    with pytest.raises(UserError, match="another process has replaced the index"):
        store.set_settings(store.manifest.settings)
    assert content_of(index)


def test_a_second_writer_is_refused(tmp_path):
    """Two writers would delete each other's files."""
    docs, index = write_pages(tmp_path / "docs", 2), str(tmp_path / "index")
    with store_class(index).lock(index):
        assert in_child(lambda: _must_be_refused(docs, index)) == 0
    build_index([str(docs)], index, ToyEmbedder())


def _must_be_refused(docs: Path, index: str) -> None:
    with pytest.raises(UserError, match="another process is writing this index"):
        build_index([str(docs)], index, ToyEmbedder())


@pytest.mark.parametrize(
    ("owner", "name"),
    [(np, "save"), (os, "fsync"), (ComputedVectors, "append"), (os, "posix_fallocate"), (os, "replace")],
)
def test_a_full_disk_is_said_and_the_old_index_stays(old_index, owner, name):
    """At the vectors, the flush, the cache, the reserved space and the manifest."""
    address, docs = old_index(0)
    before = content_of(address)
    with failing(0, [(owner, name)], lambda: OSError(errno.ENOSPC, "No space left on device")):
        with pytest.raises(UserError, match="not enough disk space"):
            build_index([str(docs)], address, ToyEmbedder())
    assert content_of(address) == before
    build_index([str(docs)], address, ToyEmbedder())
    assert content_of(address) != before


def test_a_full_disk_inside_the_search_library_is_said(old_index, monkeypatch):
    """tantivy reports it as a ValueError with a text."""
    import tantivy

    class Full:
        def __init__(self, *_: object, **__: object) -> None:
            raise ValueError("An IO error occurred: 'No space left on device (os error 28)'")

    address, docs = old_index(0)
    monkeypatch.setattr(tantivy, "Index", Full)
    with pytest.raises(UserError, match="not enough disk space"):
        build_index([str(docs)], address, ToyEmbedder())


def test_an_embedder_that_fails_leaves_the_old_index_and_the_computed_vectors(old_index):
    """A server that goes away after an hour."""
    address, docs = old_index(0)
    before, embedder = content_of(address), ToyEmbedder(batch=1)
    original = ComputedVectors.append

    def append(*arguments: Any) -> None:
        if len(embedder.computed) == 3:
            raise UserError("the embedding server does not answer")
        original(*arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ComputedVectors, "append", append)
        with pytest.raises(UserError, match="does not answer"):
            build_index([str(docs)], address, embedder)
    assert content_of(address) == before
    again = ToyEmbedder(batch=1)
    build_index([str(docs)], address, again)
    assert not set(again.computed) & set(embedder.computed[:2])


def test_a_torn_cache_is_cut_to_its_whole_vectors(tmp_path):
    """A killed process leaves half a vector, or vectors without keys."""
    embedder = ToyEmbedder(dimension=4)
    cache = ComputedVectors(tmp_path, embedder)
    cache.append([b"a" * 32, b"b" * 32], np.eye(4, dtype=np.float32)[:2])
    for path, tail in (("vectors", bytes(16 + 7)), ("keys", b"c" * 31)):
        with next(tmp_path.glob(f"*.{path}")).open("ab") as file:
            file.write(tail)
    cache = ComputedVectors(tmp_path, embedder)
    assert list(cache.numbers) == [b"a" * 32, b"b" * 32]
    cache.append([b"d" * 32], np.full((1, 4), 0.5, np.float32))
    assert ComputedVectors(tmp_path, embedder).vectors()[2].tolist() == [0.5] * 4
