"""An index in a folder: a missing, cut or foreign file is named, and a reader is not disturbed by a writer."""

import json
from pathlib import Path

import numpy as np
import pytest
from sample_files import write_pages
from test_indexing import content_of
from toy_embedder import ToyEmbedder

from tunewell.core.errors import UserError
from tunewell.features.retrieval import search as search_module
from tunewell.features.retrieval.indexing import build_index
from tunewell.features.retrieval.search import Retriever
from tunewell.features.retrieval.stores import folder as folder_store
from tunewell.features.retrieval.stores.base import STORES, open_store, shown_address, store_class


@pytest.fixture
def index(tmp_path: Path) -> Path:
    docs = write_pages(tmp_path / "docs", 5)
    build_index([str(docs)], str(tmp_path / "index"), ToyEmbedder())
    return tmp_path / "index"


def search(index: Path) -> None:
    Retriever(open_store(index), ToyEmbedder()).search("page 3", 2)


@pytest.mark.parametrize("name", ["passages.jsonl", "offsets.npy", "keys.bin", "vectors.npy", "documents.jsonl"])
@pytest.mark.parametrize("damage", ["gone", "cut", "longer"])
def test_a_damaged_file_is_named(index, name, damage):
    """An index that answers from half of its passages looks like one that works."""
    (path,) = index.glob(f"data-*/{name}")
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-3] if damage == "cut" else path.read_bytes() + b"\n")
    with pytest.raises(UserError, match="is damaged") as caught:
        open_store(index)
    assert name in (caught.value.where or "")
    assert "tunewell index" in (caught.value.fix or "")


def test_damaged_word_files_are_an_error(index):
    """They belong to tantivy, which reports them in its own words."""
    for path in index.glob("data-*/words/*"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(UserError, match="is damaged"):
        search(index)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is damaged"), ("[]", "is damaged"), ("{}", "is damaged"), ('{"format_version": 99}', "newer version")],
)
def test_a_damaged_or_newer_manifest_is_an_error(index, text, message):
    """It is the one file that everything else hangs on."""
    (index / "index.json").write_text(text)
    with pytest.raises(UserError, match=message):
        open_store(index)


def test_a_damaged_index_is_made_again(index, tmp_path):
    """The advice of the error must work: the damaged index is in the way of its own repair."""
    next(index.glob("data-*/vectors.npy")).write_bytes(b"")
    with pytest.raises(UserError, match="is damaged"):
        open_store(index)
    built = build_index([str(tmp_path / "docs")], str(index), ToyEmbedder())
    assert built.manifest.counts.embedded == 5
    assert any("damaged" in note for note in built.notes)
    search(index)


def test_a_folder_with_other_files_is_not_overwritten(tmp_path):
    """`--out ~` would put an index between the user's files."""
    docs = write_pages(tmp_path / "docs", 1)
    with pytest.raises(UserError, match="not empty and not an index"):
        build_index([str(docs)], str(docs), ToyEmbedder())
    with pytest.raises(UserError, match="is a file"):
        build_index([str(docs)], str(docs / "page-0000.md"), ToyEmbedder())
    with pytest.raises(UserError, match="there is no index"):
        open_store(tmp_path / "nothing")


def test_a_reader_keeps_its_content_while_the_index_is_replaced(index, tmp_path):
    """A server that reads old passages with the scores of new ones shows wrong sources."""
    reader = Retriever(open_store(index), ToyEmbedder())
    before = reader.search("code word of page 3", 3)
    for number in range(4):
        (tmp_path / "docs" / f"page-{number:04}.md").write_text(f"# Other {number}\n\nother text {number}")
    build_index([str(tmp_path / "docs")], str(index), ToyEmbedder())
    assert reader.search("code word of page 3", 3) == before
    assert Retriever(open_store(index), ToyEmbedder()).search("other text 3", 1)[0].passage.title == "Other 3"


def test_clusters_find_what_an_exact_search_finds(tmp_path, monkeypatch):
    """Above a size, only the nearest clusters are read; a wrong number or metric shows here."""
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(3_000, 16)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    build_index([str(write_pages(tmp_path / "docs", 5))], str(tmp_path / "index"), ToyEmbedder())
    store = open_store(tmp_path / "index")
    exact = folder_store.FolderStore.search_vectors
    monkeypatch.setattr(folder_store, "_RECALL", 1.01)  # all clusters
    folder_store._write_clusters(tmp_path / "clusters.faiss", vectors, lambda _: None)
    store._vectors = vectors
    wanted = [exact(store, vectors[number], 10) for number in range(20)]
    monkeypatch.setattr(store, "_data", tmp_path)
    monkeypatch.setattr(store, "_is_clustered", lambda: True)
    for number in range(20):
        found = store.search_vectors(vectors[number], 10)
        assert [one for one, _ in found] == [one for one, _ in wanted[number]]
        assert np.allclose([score for _, score in found], [score for _, score in wanted[number]], atol=1e-5)


def test_a_query_reads_as_few_clusters_as_find_the_nearest_passages(tmp_path):
    """A fixed share of the clusters found 79% of the ten nearest passages of one index, and was too many elsewhere."""
    import faiss

    rng = np.random.default_rng(1)
    numbers = {}
    for name, spread in (("near each other", 0.3), ("noise", 20.0)):
        vectors = (rng.normal(size=(40, 1, 32)) + spread * rng.normal(size=(40, 50, 32))).reshape(-1, 32)
        vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
        folder_store._write_clusters(tmp_path / "clusters.faiss", vectors, lambda _: None)
        index = faiss.read_index(str(tmp_path / "clusters.faiss"))
        queries = vectors[:100] + 0.5 * rng.normal(size=(100, 32)).astype(np.float32) / 32**0.5
        exact = np.argsort(-(queries @ vectors.T), axis=1)[:, :10]
        found = index.search(queries, 10)[1]
        assert np.mean([np.isin(own, wanted).mean() for own, wanted in zip(found, exact, strict=True)]) > 0.95, name
        numbers[name] = index.nprobe / index.nlist
    assert numbers["near each other"] < 0.6 * numbers["noise"], numbers


def test_words_and_documents_are_those_of_the_pages(index):
    """The refusal counts the passages with a word."""
    store = open_store(index)
    assert store.num_passages_with(["page", "w15838", "nothing"]) == [5, 1, 0]
    assert [(entry.first, entry.num_passages) for entry in store.documents()] == [(n, 1) for n in range(5)]
    assert store.search_words([], 5) == []
    assert store.search_words(["nothing"], 5) == []
    assert [number for number, _ in store.search_words(["w15838"], 5)] == [2]


def test_the_manifest_has_no_absolute_path_but_the_documents(index):
    """An index is copied to another machine."""
    manifest = json.loads((index / "index.json").read_text())
    assert manifest["generation"].startswith("data-")
    moved = index.rename(index.with_name("moved"))
    assert content_of(str(moved))


def test_unknown_schemes_are_refused():
    """A typo in the scheme would create a folder of that name."""
    assert STORES.names() == ("folder", "postgresql")
    with pytest.raises(UserError, match="cannot be kept in `mysql://`"):
        store_class("mysql://host/db")


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("folder/index", "folder/index"),
        ("postgresql://me:secret@host:5432/db#fees", "postgresql://me@host:5432/db#fees"),
        ("postgresql://me:s@cr:t@host/db", "postgresql://me@host/db"),
        ("postgresql://host/db?password=secret&host=/run", "postgresql://host/db?host=/run"),
        ("postgresql://host/db?sslpassword=secret", "postgresql://host/db"),
        ("postgresql://me:sec[ret@host/db", "postgresql://..."),
    ],
)
def test_an_address_is_shown_without_its_password(address, shown):
    """Screens, errors and records are pasted into chats."""
    assert shown_address(address) == shown
    assert "secret" not in shown_address(address)


def _replace(path: Path, content: bytes) -> None:
    """Write a new file: a thread of tantivy may have mapped the old one, and a mapped file must not become shorter."""
    path.unlink()
    path.write_bytes(content)


def _flip(path: Path, place: int) -> bytes:
    before = bytearray(path.read_bytes())
    before[place] ^= 4
    _replace(path, bytes(before))
    return bytes(before)


def _without_hashes(index: Path) -> None:
    """Change the manifest to one of a version that wrote no hashes."""
    record = json.loads((index / "index.json").read_text())
    kept = {name: {**entry, "sha256": ""} for name, entry in record["files"].items() if "/" not in name}
    record = {key: value for key, value in record.items() if key not in ("sha256", "arguments")} | {"files": kept}
    (index / "index.json").write_text(json.dumps(record))


def test_a_flipped_bit_in_any_file_is_an_error_and_indexing_again_repairs_it(index, tmp_path):
    """`ask` quoted a changed passage without a warning, and `index` reused it as unchanged."""
    docs, text = str(tmp_path / "docs"), content_of(str(index))
    paths = [path for path in sorted(index.rglob("*")) if path.is_file() and path.stat().st_size]
    assert len(paths) > 10
    for path in paths:
        whole = path.read_bytes()
        _flip(path, len(whole) // 2)
        with pytest.raises(UserError, match="is damaged") as caught:
            search(index)
        command = (caught.value.fix or "").split("`")[1]
        assert command.endswith(f"--out {index}") and (path.name == "index.json" or f"index {docs}" in command)
        _replace(path, whole)
    for name in ("index.json", "data-*/passages.jsonl", "data-*/words/*.idx"):
        path = next(index.glob(name))
        _flip(path, path.stat().st_size // 2)
        built = build_index([docs], str(index), ToyEmbedder())
        assert any("damaged" in note for note in built.notes)
        assert content_of(str(index)) == text


def test_damage_in_an_index_without_hashes_is_an_error_of_the_user(index, capfd):
    """tantivy panics over damaged files, with a Rust backtrace on stderr; numpy and json have errors of their own."""
    _without_hashes(index)
    for path in [path for path in index.glob("data-*/**/*") if path.is_file() and path.stat().st_size]:
        for place in {0, path.stat().st_size // 2, path.stat().st_size - 1}:
            whole = path.read_bytes()
            _flip(path, place)
            try:
                search(index)
            except UserError as error:
                assert "tunewell index" in (error.fix or "")
            _replace(path, whole)
    assert capfd.readouterr().err == ""


def test_an_index_without_hashes_is_read_with_a_note_and_made_again_from_its_documents(index, tmp_path, monkeypatch):
    """Its passages cannot be verified, so an update must not reuse them; the chosen settings stay."""
    _without_hashes(index)
    monkeypatch.setattr(search_module, "open_embedder", lambda _: ToyEmbedder())
    retriever = search_module.open_retriever(str(index))
    assert f"tunewell index DOCUMENTS --out {index}" in retriever.notes[0]
    path = next(index.glob("data-*/passages.jsonl"))
    whole = path.read_bytes()
    _flip(path, whole.index(b'"text": "') + 10)
    built = build_index([str(tmp_path / "docs")], str(index), ToyEmbedder())
    assert built.manifest.counts.embedded == 5
    assert built.manifest.has_hashes
    assert next(index.glob("data-*/passages.jsonl")).read_bytes() == whole
    assert not search_module.open_retriever(str(index)).notes
