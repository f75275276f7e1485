"""Every file below the named paths is indexed or skipped for a counted reason."""

import os
from pathlib import Path

import pytest
from sample_files import pdf
from toy_embedder import ToyEmbedder

from tunewell.core.errors import UserError
from tunewell.features.retrieval.documents import SKIP_REASONS, DocumentLedger, find_documents, read_bytes
from tunewell.features.retrieval.indexing import build_index
from tunewell.features.retrieval.readers.blocks import Unreadable


def names(paths: list[str], ledger: DocumentLedger) -> list[str]:
    return [Path(file.name).name for file in find_documents(paths, ledger)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a file for almost every reason to skip it."""
    docs = tmp_path / "docs"
    (docs / "inner").mkdir(parents=True)
    (docs / "a.md").write_text("# A\n\ntext a")
    (docs / "copy.md").write_text("# A\n\ntext a")
    (docs / "inner" / "b.TXT").write_text("text b")
    (docs / "scan.pdf").write_bytes(pdf(""))
    (docs / "locked.pdf").write_bytes(pdf("x", password="x"))
    (docs / "cut.pdf").write_bytes(pdf("x")[:100])
    (docs / "noise.txt").write_bytes(bytes(range(256)))
    (docs / "blank.md").write_text(" \n\t\n")
    (docs / "headings.md").write_text("# one\n\n## two\n")
    (docs / "all.zip").write_bytes(b"PK\x03\x04")
    (docs / "photo.jpg").write_bytes(b"\xff\xd8")
    (docs / "README").write_text("no extension")
    (docs / ".secret.md").write_text("hidden")
    (docs / ".git").mkdir()
    (docs / ".git" / "x.md").write_text("hidden")
    return docs


def test_the_ledger_closes(folder, tmp_path):
    """A file that is lost without a word is an answer that is missing without a word."""
    counts = build_index([str(folder)], str(tmp_path / "index"), ToyEmbedder()).manifest.counts
    assert counts.skipped == {
        "archive": 1, "broken": 1, "empty": 1, "encrypted": 1, "hidden": 2, "no_text": 2, "not_text": 1,
        "unsupported": 2,
    }  # fmt: skip
    assert counts.files == counts.indexed + sum(counts.skipped.values()) == 14
    assert (counts.indexed, counts.passages, counts.duplicates) == (3, 2, 1)
    assert counts.examples.keys() == counts.skipped.keys() <= SKIP_REASONS.keys()


def test_links_are_followed_only_inside_the_folder(tmp_path):
    """A link loop never ends, and a link to the outside indexes what nobody named."""
    docs, outside = tmp_path / "docs", tmp_path / "outside"
    docs.mkdir(), outside.mkdir()
    (docs / "a.md").write_text("text")
    (outside / "private.md").write_text("private")
    (docs / "same.md").symlink_to("a.md")
    (docs / "out.md").symlink_to(outside / "private.md")
    (docs / "gone.md").symlink_to("nothing.md")
    (docs / "self.md").symlink_to("self.md")
    (docs / "up").symlink_to(tmp_path)
    (docs / "loop").symlink_to(docs)
    ledger = DocumentLedger()
    assert names([str(docs)], ledger) == ["a.md"]
    assert ledger.skipped["link"] >= 4
    assert ledger.num_files == 1 + sum(ledger.skipped.values())


def test_one_file_named_twice_is_one_document(tmp_path):
    """`docs docs/a.md` would give every passage twice."""
    (tmp_path / "a.md").write_text("text")
    ledger = DocumentLedger()
    assert names([str(tmp_path), str(tmp_path / "a.md"), f"{tmp_path}/../{tmp_path.name}/a.md"], ledger) == ["a.md"]
    assert ledger.num_files == 1


def test_the_order_does_not_depend_on_the_disk(tmp_path):
    """The numbers of passages, and with them ties, would differ between machines."""
    for name in ("b.md", "a.md", "c.md"):
        (tmp_path / name).write_text("text")
    assert names([str(tmp_path)], DocumentLedger()) == ["a.md", "b.md", "c.md"]


def test_a_huge_file_is_not_read(tmp_path):
    """2 GB of zeros would be read into memory before anybody notices."""
    huge = tmp_path / "huge.txt"
    with huge.open("wb") as file:
        file.truncate(2 << 30)
    (file,) = find_documents([str(huge)], DocumentLedger())
    with pytest.raises(Unreadable) as caught:
        read_bytes(file)
    assert caught.value.reason == "too_large"


def test_what_is_no_file_is_not_opened(tmp_path):
    """Opening a pipe waits for ever."""
    os.mkfifo(tmp_path / "pipe.md")
    (tmp_path / "a.md").write_text("text")
    counts = build_index([str(tmp_path)], str(tmp_path / "index"), ToyEmbedder()).manifest.counts
    assert (counts.indexed, counts.skipped) == (1, {"unreadable": 1})


@pytest.mark.parametrize("content", [[], ["photo.jpg"], ["empty.md"]])
def test_a_folder_without_documents_is_an_error_and_makes_no_index(content, tmp_path):
    """An empty index would answer every question with `not in the documents`."""
    docs = tmp_path / "docs"
    docs.mkdir()
    for name in content:
        (docs / name).touch()
    with pytest.raises(UserError, match="no document"):
        build_index([str(docs)], str(tmp_path / "index"), ToyEmbedder())
    assert not (tmp_path / "index" / "index.json").exists()


def test_a_path_that_does_not_exist_is_named(tmp_path):
    """A mistyped path must not become a smaller index."""
    (tmp_path / "a.md").write_text("text")
    with pytest.raises(UserError, match=r"no file or folder `.*b\.md`"):
        find_documents([str(tmp_path / "a.md"), str(tmp_path / "b.md")], DocumentLedger())


def test_names_that_are_not_unicode_are_indexed(tmp_path):
    """Old archives have file names in other encodings; JSON has no such letters."""
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / os.fsdecode(b"caf\xe9.md")).write_text("text")
    counts = build_index([str(docs)], str(tmp_path / "index"), ToyEmbedder()).manifest.counts
    assert counts.indexed == 1
    assert build_index([str(docs)], str(tmp_path / "index"), ToyEmbedder()).manifest.counts.embedded == 0


def test_the_index_in_the_documents_folder_is_not_indexed(tmp_path):
    """`tunewell index . --out index` reads its own passages the second time."""
    (tmp_path / "a.md").write_text("text")
    for _ in range(2):
        counts = build_index([str(tmp_path)], str(tmp_path / "index"), ToyEmbedder()).manifest.counts
        assert (counts.passages, counts.indexed) == (1, 1)
