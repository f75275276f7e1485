"""A folder has one owner; where the disk has no locks, the name in the file is the lock."""

import errno
import json
import os
import socket
import subprocess
import sys

import pytest

from tunewell.core import lock
from tunewell.core.errors import UserError
from tunewell.core.lock import FolderLock


@pytest.fixture(params=[errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def no_locks(request, monkeypatch):
    """A disk that cannot lock, as some network disks cannot."""
    if lock.fcntl is None:
        return

    def refuse(*arguments):
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(lock.fcntl, "flock", refuse)


def leave(path, *, pid, host):
    path.write_text(json.dumps({"pid": pid, "host": host, "since": "2026-01-02 03:04:05+00:00"}))


def dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_the_file_says_who_holds_the_folder_and_nothing_once_it_is_free(tmp_path):
    """People look into it when something is stuck."""
    held = FolderLock.take(tmp_path / ".lock", doing="training")
    owner = json.loads((tmp_path / ".lock").read_text())
    assert (owner["pid"], owner["host"]) == (os.getpid(), socket.gethostname())
    assert owner["since"].startswith("20")
    held.release()
    held.release()
    assert (tmp_path / ".lock").read_text() == ""


def test_without_locks_a_living_owner_is_respected(tmp_path, no_locks):
    """Two runs on a network disk are as bad as two on a local one."""
    leave(tmp_path / ".lock", pid=os.getpid(), host=socket.gethostname())
    with pytest.raises(UserError, match="another process is training") as caught:
        FolderLock.take(tmp_path / ".lock", doing="training")
    assert caught.value.where == f"process {os.getpid()}, since 2026-01-02 03:04:05+00:00"
    assert "delete" in (caught.value.fix or "")


def test_without_locks_a_dead_owner_is_followed(tmp_path, no_locks):
    """The process is gone, so the folder is free."""
    leave(tmp_path / ".lock", pid=dead_process(), host=socket.gethostname())
    FolderLock.take(tmp_path / ".lock", doing="training").release()
    FolderLock.take(tmp_path / ".lock", doing="training").release()


def test_without_locks_an_owner_on_another_machine_is_respected(tmp_path, no_locks):
    """From here nobody can tell whether it lives."""
    leave(tmp_path / ".lock", pid=dead_process(), host="elsewhere")
    with pytest.raises(UserError) as caught:
        FolderLock.take(tmp_path / ".lock", doing="training")
    assert "on elsewhere, since" in (caught.value.where or "")


@pytest.mark.parametrize("text", ["", "123\n", "{", '{"pid": 1}', "\x00\xff"])
def test_a_lock_file_that_says_nothing_is_free(tmp_path, no_locks, text):
    """Its owner died while writing it, or an older version wrote it."""
    (tmp_path / ".lock").write_text(text, encoding="latin-1")
    FolderLock.take(tmp_path / ".lock", doing="training").release()
