"""A full disk: the old corpus stays as it was, the error says how much is missing, the next run goes on."""

import errno
from types import SimpleNamespace

import pytest
from fault_points import WRITES, failing, planned_once

from corpora import prepare_in, rows_file, tree
from tunewell import open_corpus
from tunewell.core.errors import UserError
from tunewell.data.corpus import build

HELD_OUT = "data.held_out=0.1"
"""With `auto`, what an old corpus holds out stays held out, so that a corpus made elsewhere would be another one."""


def no_space() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def old(tiny_model, tmp_path):
    """A corpus of 30 rows in place, and rows for another one."""
    rows = rows_file(tmp_path / "rows.jsonl", 30)
    prepare_in(tmp_path, tiny_model, rows, HELD_OUT)
    return tree(tmp_path / "corpus"), rows_file(rows, 40)


@pytest.mark.slow
def test_wherever_the_disk_fills_up_the_old_corpus_stays_and_the_next_run_ends_well(old, tiny_model, tmp_path):
    """Parts, staged tokens, shards, index, tokenizer, manifest: none may break what was there."""
    before, rows = old
    elsewhere = rows_file(tmp_path / "elsewhere" / "rows.jsonl", 40)
    after = tree(prepare_in(elsewhere.parent, tiny_model, elsewhere, HELD_OUT).corpus)
    # A move takes no room; one that fails all the same is tested with `publish_folder`.
    places = [place for place in WRITES if place[1] != "rename"]
    refused = []
    with planned_once():
        for at in range(1_000):
            with failing(at, places, no_space):
                try:
                    prepare_in(tmp_path, tiny_model, rows, HELD_OUT)
                    break
                except UserError as error:
                    refused.append(error.what)
            found = tree(tmp_path / "corpus")
            assert found in (before, after), at
            if found == after:
                break
    assert len(refused) > 50
    assert all(what.startswith("not enough disk space: about ") for what in refused)
    assert tree(prepare_in(tmp_path, tiny_model, rows, HELD_OUT).corpus) == after


def test_too_little_room_is_found_before_the_first_shard_is_written(old, tiny_model, tmp_path, monkeypatch):
    """Eight bytes a token are known to be needed once the tokens are counted."""
    before, rows = old
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1_000))
    monkeypatch.setattr("tunewell.data.corpus.writer.write_split", lambda *a, **k: pytest.fail("a shard was written"))
    with pytest.raises(UserError, match=r"not enough disk space: about .* short") as caught:
        prepare_in(tmp_path, tiny_model, rows)
    assert "needs" in (caught.value.where or "")
    assert "run the command again" in (caught.value.fix or "")
    assert tree(tmp_path / "corpus") == before


def test_what_was_tokenised_before_the_disk_was_full_is_not_tokenised_again(old, tiny_model, tmp_path, monkeypatch):
    """The work of an hour is kept; only the half-made corpus goes, which makes room."""
    _, rows = old
    with monkeypatch.context() as patched:
        patched.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=0))
        with pytest.raises(UserError, match="not enough disk space"):
            prepare_in(tmp_path, tiny_model, rows)
    assert not (tmp_path / ".tunewell" / "prepare-corpus" / "staging").exists()
    monkeypatch.setattr(build, "_encode", lambda *a: pytest.fail("tokenised again"))
    assert prepare_in(tmp_path, tiny_model, rows).manifest.rows_in == 40


def test_a_disk_that_is_broken_is_not_called_full(old, tiny_model, tmp_path):
    """Freeing room would not help."""
    before, rows = old
    with failing(25, WRITES, lambda: OSError(errno.EIO, "Input/output error")):
        with pytest.raises(OSError, match="Input/output error"):
            prepare_in(tmp_path, tiny_model, rows)
    assert tree(tmp_path / "corpus") == before
    assert open_corpus(tmp_path / "corpus", verify=True).manifest.rows_in == 30
