"""The cache of remote files while other processes use it, and endpoints that must not be shown."""

import os
from pathlib import Path

import pytest

from tunewell.config.rules import Storage
from tunewell.core.errors import UserError
from tunewell.features.remote.access import find_access
from tunewell.features.remote.address import Address, compile_pattern, parse_address
from tunewell.features.remote.cache import ObjectCache, cache_key
from tunewell.features.remote.push import pull_folder
from tunewell.features.remote.store import RemoteObject


@pytest.fixture
def cache(tmp_path, monkeypatch) -> ObjectCache:
    monkeypatch.setenv("TUNEWELL_CACHE", str(tmp_path))
    monkeypatch.setattr(ObjectCache, "_used", set())
    return ObjectCache(Storage())


def stored(cache: ObjectCache, name: str) -> RemoteObject:
    """Add an object to the cache, as a finished download does."""
    entry = RemoteObject(Address("s3", "rows", name), 3, "stamp")
    key = cache_key(entry.address)
    partial = cache.partial_path(key, entry)
    partial.write_bytes(b"abc")
    cache.add(partial, key, entry, f"{name}{'0' * 60}")
    return entry


def test_files_that_another_process_moves_do_not_stop_making_room(cache, monkeypatch):
    """Between listing and stat, the other process finishes its download or removes old content."""
    (cache.folder / "content" / "aa").mkdir()
    for path in (cache.folder / "partial" / "moved", cache.folder / "content" / "aa" / "removed"):
        path.symlink_to(cache.folder / "gone")  # listed, and FileNotFoundError from stat
    cache.make_room(3, wanted_bytes=3)


def test_a_record_that_another_process_adds_is_kept(cache, monkeypatch):
    """It was dropped as stale, and the other process ended with `was removed from the cache`."""
    real, added = cache._least_used, []

    def least_used(sizes):
        added.append(stored(cache, "new"))
        return real(sizes)

    monkeypatch.setattr(cache, "_least_used", least_used)
    cache.make_room(3, wanted_bytes=3)
    assert cache.find(cache_key(added[0].address), added[0]) is not None


def test_a_record_that_another_process_removes_is_no_crash(cache, monkeypatch):
    entry = stored(cache, "old")
    cache._used.clear()

    def utime(path, *_, **__):
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "utime", utime)
    assert cache.find(cache_key(entry.address), entry) is not None


def test_a_partial_file_stays_writable_until_it_is_moved(cache, monkeypatch):
    """A process killed between the two left a read-only file, which no later download could continue."""
    modes, real = [], Path.replace

    def replace(self, target):
        modes.append(self.stat().st_mode & 0o200)
        return real(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    stored(cache, "new")
    assert modes[0] == 0o200


@pytest.mark.parametrize(
    "endpoint", ["http://user:secret-word@127.0.0.1:9", "127.0.0.1:9", "https://host/?token=secret-word"]
)
def test_an_endpoint_with_a_password_or_without_a_scheme_is_refused_unseen(endpoint, tmp_path):
    """Errors showed it, and the storage library panicked without a scheme."""
    files = {"AWS_CONFIG_FILE": str(tmp_path / "a"), "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "b")}
    keys = {"AWS_ACCESS_KEY_ID": "AK", "AWS_SECRET_ACCESS_KEY": "other"}
    with pytest.raises(UserError, match="is not valid") as caught:
        find_access(parse_address("s3://rows/x"), Storage(), {**files, **keys, "AWS_ENDPOINT_URL": endpoint})
    assert "secret-word" not in str(caught.value) and "https://HOST" in str(caught.value.fix)


@pytest.mark.parametrize("pattern", ["part-[z-a].jsonl", "part-[!].jsonl]"])
def test_a_pattern_with_wrong_brackets_is_an_error_of_the_user(pattern):
    with pytest.raises(UserError, match="not a valid pattern"):
        compile_pattern(pattern)


def test_a_pushed_folder_on_the_hub_is_not_taken_for_a_bucket(tmp_path):
    with pytest.raises(UserError) as caught:
        pull_folder("hf://user/name", tmp_path, settings=Storage())
    assert "hf download" in str(caught.value.fix)
