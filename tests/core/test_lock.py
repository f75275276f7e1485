"""Two commands never work in one folder at once, and a dead one never blocks a living one."""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from tunewell.core.errors import UserError
from tunewell.core.files import FolderLock

HOLD = """
import sys
from pathlib import Path
from tunewell.core.files import FolderLock
with FolderLock.take(Path(sys.argv[1]), doing="holding"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path / "lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_held_lock_refuses_a_second_owner_and_names_the_first(tmp_path, holder):
    """Two prepares in one folder would mix their files."""
    with pytest.raises(UserError) as caught, FolderLock.take(tmp_path / "lock", doing="preparing `corpus`"):
        pass
    assert caught.value.what == "another process is preparing `corpus`"
    assert str(caught.value.where).startswith(f"process {holder.pid}, since ")


def test_a_lock_whose_owner_was_killed_is_free(tmp_path, holder):
    """A lock file that outlives its owner has to be deleted by hand, and people delete the wrong thing."""
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with FolderLock.take(tmp_path / "lock", doing="preparing"):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()


def test_a_lock_is_free_again_after_its_body_failed(tmp_path):
    """An error inside must not lock the next try out."""
    with pytest.raises(ZeroDivisionError), FolderLock.take(tmp_path / "lock", doing="dividing"):
        _ = 1 / 0
    with FolderLock.take(tmp_path / "lock", doing="dividing"):
        pass


@pytest.fixture(params=[errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def no_locks(request, monkeypatch):
    """A disk that cannot lock, as some network disks cannot."""

    def refuse(*arguments):
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", refuse)


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


@pytest.mark.parametrize("text", ["", "{", '{"pid": 1}', "\x00\x00"])
def test_a_lock_file_that_says_nothing_is_free(tmp_path, no_locks, text):
    """Its owner died while writing it, or an older version wrote it."""
    (tmp_path / ".lock").write_text(text, encoding="latin-1")
    FolderLock.take(tmp_path / ".lock", doing="training").release()
