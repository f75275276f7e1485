"""Folders with rows or answers can be opened by their owner only; a folder that was there keeps its mode."""

import os
import stat

import pytest

from tunewell.core.cache import cache_folder
from tunewell.core.files import make_private, publish_folder, write_atomic
from tunewell.records.rundir import RunDir

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_private_folder_is_made_with_its_parents(tmp_path):
    make_private(tmp_path / "a" / "b")
    assert mode(tmp_path / "a" / "b") == 0o700 and mode(tmp_path / "a") & 0o055
    make_private(tmp_path / "a" / "b")


def test_a_folder_that_was_there_keeps_its_mode(tmp_path):
    """Teams share folders on purpose."""
    (tmp_path / "team").mkdir(mode=0o755)
    make_private(tmp_path / "team")
    assert mode(tmp_path / "team") == 0o755


def test_a_group_that_shares_a_folder_can_open_new_ones_in_it(tmp_path):
    """A setgid folder is how a group shares its files: a colleague must be able to resume a run in it."""
    (tmp_path / "team").mkdir()
    (tmp_path / "team").chmod(0o2770)
    before = os.umask(0o007)
    try:
        make_private(tmp_path / "team" / "run")
        make_private(tmp_path / "own")
    finally:
        os.umask(before)
    assert mode(tmp_path / "team" / "run") & 0o777 == 0o770 and mode(tmp_path / "own") == 0o700


def test_a_published_folder_has_the_mode_of_the_one_it_replaces(tmp_path):
    """Otherwise each `prepare` takes a shared corpus away from the team."""
    for name in ("corpus", "staged"):
        make_private(tmp_path / name)
    (tmp_path / "corpus").chmod(0o750)
    publish_folder(tmp_path / "staged", tmp_path / "corpus")
    assert mode(tmp_path / "corpus") == 0o750


def test_a_file_in_the_way_is_an_error(tmp_path):
    (tmp_path / "a").write_text("")
    with pytest.raises(FileExistsError):
        make_private(tmp_path / "a")


def test_private_files_stay_private_when_they_are_replaced(tmp_path):
    (tmp_path / "a").write_text("old")
    for _ in range(2):
        write_atomic(tmp_path / "a", "new", is_private=True)
        assert mode(tmp_path / "a") == 0o600 and (tmp_path / "a").read_text() == "new"


def test_runs_and_caches_are_private(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNEWELL_CACHE", str(tmp_path / "cache"))
    assert cache_folder("bases") is not None and mode(tmp_path / "cache") == 0o700
    with RunDir.begin(tmp_path / "run"):
        assert mode(tmp_path / "run") == 0o700
