"""Two commands never work in one folder at once, and a dead one never blocks a living one."""

import os
import signal
import subprocess
import sys

import pytest

from tunewell.core.errors import UserError
from tunewell.core.lock import only_one

HOLD = """
import sys
from pathlib import Path
from tunewell.core.lock import only_one
with only_one(Path(sys.argv[1]), doing="holding"):
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
    with pytest.raises(UserError) as caught, only_one(tmp_path / "lock", doing="preparing `corpus`"):
        pass
    assert caught.value.what == "another process is preparing `corpus`"
    assert caught.value.where == f"process {holder.pid}"


def test_a_lock_whose_owner_was_killed_is_free(tmp_path, holder):
    """A lock file that outlives its owner has to be deleted by hand, and people delete the wrong thing."""
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with only_one(tmp_path / "lock", doing="preparing"):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_a_lock_is_free_again_after_its_body_failed(tmp_path):
    """An error inside must not lock the next try out."""
    with pytest.raises(ZeroDivisionError), only_one(tmp_path / "lock", doing="dividing"):
        _ = 1 / 0
    with only_one(tmp_path / "lock", doing="dividing"):
        pass
