"""Files are whole or absent, folders are replaced or left, and a full disk says how much is missing."""

import errno
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tunewell.core.errors import UserError
from tunewell.core.files import (
    disk_full_as_user_error,
    has_unfinished_publish,
    publish_folder,
    recover_publish,
    require_disk_space,
    sha256_file,
    sha256_text,
    short_path,
    stable_json,
    sync_tree,
    write_atomic,
)


class Killed(BaseException):
    """Stands for a process that ends here: nothing that catches errors catches it."""


def folder_with(path: Path, text: str) -> Path:
    path.mkdir(parents=True)
    (path / "inside.txt").write_text(text)
    return path


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_an_atomic_write_replaces_the_file_and_leaves_nothing_else(tmp_path):
    """A temporary file left beside the real one would be taken for data by the next glob."""
    write_atomic(tmp_path / "a.json", "old")
    write_atomic(tmp_path / "a.json", b"new")
    assert (tmp_path / "a.json").read_bytes() == b"new"
    assert names(tmp_path) == ["a.json"]


@pytest.mark.parametrize("where", ["os.fsync", "pathlib.Path.replace"])
def test_an_atomic_write_that_fails_keeps_the_old_file(tmp_path, monkeypatch, where):
    """The old manifest is worth more than half a new one."""
    write_atomic(tmp_path / "a.json", "old")

    def fail(*arguments):
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patched:
        patched.setattr(where, fail)
        with pytest.raises(OSError, match="broken"):
            write_atomic(tmp_path / "a.json", "new")
    assert (tmp_path / "a.json").read_text() == "old"
    assert names(tmp_path) == ["a.json"]


def test_publishing_puts_the_new_folder_in_the_place_of_the_old_one(tmp_path):
    """Files of the old corpus must not live on among the new ones."""
    final = folder_with(tmp_path / "corpus", "old")
    (final / "only_in_the_old.txt").touch()
    publish_folder(folder_with(tmp_path / "work" / "corpus", "new"), final)
    assert (final / "inside.txt").read_text() == "new"
    assert names(final) == ["inside.txt"]
    assert names(tmp_path) == ["corpus", "work"]


def test_a_publish_that_fails_puts_the_old_folder_back(tmp_path, monkeypatch):
    """The old corpus stays readable whatever goes wrong with the new one."""
    final = folder_with(tmp_path / "corpus", "old")
    staged = folder_with(tmp_path / "work" / "corpus", "new")
    rename = Path.rename

    def fail_for_staged(path, target):
        if path == staged:
            raise OSError(errno.EXDEV, "other disk")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail_for_staged)
    with pytest.raises(OSError, match="other disk"):
        publish_folder(staged, final)
    assert (final / "inside.txt").read_text() == "old"
    assert names(tmp_path) == ["corpus", "work"]


def test_a_publish_killed_between_its_two_moves_is_undone_later(tmp_path):
    """Between the moves there is no corpus; the next run finds the old one and brings it back."""
    final = tmp_path / "corpus"
    folder_with(tmp_path / ".corpus.old", "old")
    assert has_unfinished_publish(final)
    recover_publish(final)
    assert (final / "inside.txt").read_text() == "old"
    assert not has_unfinished_publish(final)


def test_a_publish_killed_while_deleting_the_old_folder_is_finished_later(tmp_path, monkeypatch):
    """A half-deleted corpus must never come back, even if the user deletes the new one."""
    final = folder_with(tmp_path / "corpus", "old")
    staged = folder_with(tmp_path / "work" / "corpus", "new")

    def killed(path):
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed)
        with pytest.raises(Killed):
            publish_folder(staged, final)
    assert (final / "inside.txt").read_text() == "new"
    assert has_unfinished_publish(final)
    shutil.rmtree(final)
    recover_publish(final)
    assert names(tmp_path) == ["work"]


def test_syncing_a_tree_reaches_every_file_and_folder(tmp_path, monkeypatch):
    """What is not flushed before the manifest is written can be missing after a power cut."""
    folder_with(tmp_path / "corpus" / "train", "x")
    folder_with(tmp_path / "corpus" / "tokenizer", "y")
    synced = []
    monkeypatch.setattr("os.fsync", synced.append)
    sync_tree(tmp_path / "corpus")
    assert len(synced) == 5


def test_moving_a_letter_from_one_part_to_the_next_changes_the_hash():
    """Hashes of joined texts collide without lengths; a lone surrogate must not break them."""
    assert sha256_text("ab", "c") != sha256_text("a", "bc")
    assert len(sha256_text("\ud800")) == 64


def test_a_file_is_hashed_to_its_last_byte(tmp_path):
    """Files are read in blocks of a mebibyte."""
    path = tmp_path / "big.bin"
    path.write_bytes(b"x" * (1 << 20) + b"y")
    before = sha256_file(path)
    path.write_bytes(b"x" * (1 << 20) + b"z")
    assert sha256_file(path) != before


def test_stable_json_does_not_depend_on_the_order_of_keys():
    """Corpora are compared byte by byte."""
    assert stable_json({"b": 1, "a": "é"}) == stable_json({"a": "é", "b": 1}) == '{\n  "a": "é",\n  "b": 1\n}\n'


def test_a_disk_with_too_little_room_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    """Finding out after an hour of writing is finding out too late."""
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1 << 30))
    require_disk_space(tmp_path, 1 << 30)
    with pytest.raises(UserError) as caught:
        require_disk_space(tmp_path, 5 << 29)
    assert caught.value.what == "not enough disk space: about 1.5 GiB short"
    assert "needs 2.5 GiB" in (caught.value.where or "")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_becomes_an_error_for_people(tmp_path, number):
    """`[Errno 28]` says neither how much is missing nor that the work so far is kept."""
    with pytest.raises(UserError, match="not enough disk space"), disk_full_as_user_error(tmp_path, lambda: 1 << 20):
        raise OSError(number, "No space left on device")


def test_other_faults_of_the_disk_stay_what_they_are(tmp_path):
    """A broken disk is not a full one, and freeing room would not help."""
    with pytest.raises(OSError, match="broken"), disk_full_as_user_error(tmp_path, lambda: 1 << 20):
        raise OSError(errno.EIO, "broken")


def test_a_path_is_shortened_only_if_it_stays_the_same_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("run", "model", "elsewhere/deep", "elsewhere/model"):
        Path(folder).mkdir(parents=True)
    Path("link").symlink_to("elsewhere/deep")
    assert short_path(Path("run/../model")) == Path("model")
    assert short_path(Path("link/../model")) == Path("link/../model"), "that is `elsewhere/model`"
    assert short_path(Path("missing/../model")) == Path("missing/../model")
