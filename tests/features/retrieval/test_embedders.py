"""An embedder is `minilm`, a folder, a hub name or an address; an index says what to do if its own is not there."""

import shutil

import pytest
from tiny_embedder import write_tiny_embedder
from toy_embedder import ToyEmbedder

from tunewell.core.errors import UserError
from tunewell.features.retrieval.embedders import sentence_transformer
from tunewell.features.retrieval.embedders.base import open_embedder
from tunewell.features.retrieval.indexing import build_index
from tunewell.features.retrieval.search import open_retriever


@pytest.mark.parametrize("name", ["wordllama", "no/such/folder", "./there"])
def test_an_unknown_embedder_is_answered_with_what_there_is(name):
    """`wordllama` was an embedder once: its users have to read what to use now."""
    with pytest.raises(UserError) as caught:
        open_embedder(name)
    assert name in caught.value.what
    assert all(one in str(caught.value.fix) for one in ("`minilm`", "folder", "hub name", "http://"))


def test_an_index_of_a_withdrawn_embedder_names_the_command_that_makes_it_again(tmp_path):
    """The stored arguments name the old embedder, so that the advised command would fail again."""
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "fees.md").write_text("# Fees\n\nThe fee is 12 pounds a term.\n")
    build_index([str(docs)], str(tmp_path / "index"), ToyEmbedder("wordllama"))
    with pytest.raises(UserError, match="wordllama") as caught:
        open_retriever(str(tmp_path / "index"))
    assert f"tunewell index {docs} --embedder minilm --language auto --out index-minilm" in str(caught.value.fix)


def test_a_hub_name_is_read_from_the_hub_cache(tmp_path, monkeypatch):
    """Only `minilm` could be named, though every sentence-transformers model of the hub can be opened."""
    folder = write_tiny_embedder(tmp_path / "made")
    snapshot = tmp_path / "hub" / "models--me--encoder" / "snapshots" / ("0" * 40)
    shutil.copytree(folder, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    opened, own = open_embedder("me/encoder"), open_embedder(str(folder))
    assert (opened.name, opened.sha256) == ("me/encoder", own.sha256)
    assert (opened.embed(["a fee"]) == own.embed(["a fee"])).all()


def test_a_model_that_is_neither_here_nor_on_the_hub_is_an_error_with_a_remedy(tmp_path, monkeypatch):
    """Offline, the default embedder has to say that a folder does."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(sentence_transformer, "_in_package", lambda: None)
    for name in ("minilm", "me/encoder"):
        with pytest.raises(UserError, match="cannot be downloaded") as caught:
            open_embedder(name)
        assert "--embedder FOLDER" in str(caught.value.fix)


def test_the_default_is_found_in_any_package_that_lists_the_pinned_weights():
    """The product names no such package: one of the development environment has the weights."""
    assert open_embedder("minilm").sha256 == sentence_transformer._SHA256
