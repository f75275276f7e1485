"""A run's folder belongs to one run and one process, and is known to be writable before the first step."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tunewell.core.errors import UserError
from tunewell.records.rundir import RunDir

HOLD = """
import sys
from pathlib import Path
from tunewell.records.rundir import RunDir
run = RunDir.begin(Path(sys.argv[1]))
(run.path / "plan.json").write_text("{}")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that trains in `run`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path / "run"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_new_run_makes_its_folder(tmp_path):
    """With its parents, and with nothing but a lock in it."""
    with RunDir.begin(tmp_path / "runs" / "first") as run:
        assert [entry.name for entry in run.path.iterdir()] == [".lock"]


def test_a_folder_that_holds_a_run_is_refused_with_the_two_ways_out(tmp_path):
    """A second run in the folder of the first mixes their checkpoints."""
    with RunDir.begin(tmp_path / "run") as run:
        run.write("plan.json", "{}")
    with pytest.raises(UserError, match="already contains a run") as caught:
        RunDir.begin(tmp_path / "run")
    assert "--resume" in (caught.value.fix or "") and "--out" in (caught.value.fix or "")
    RunDir.reopen(tmp_path / "run").close()


def test_other_peoples_files_are_neither_mixed_with_nor_touched(tmp_path):
    """`--out ~/Documents` is a slip of the finger, and must not leave a trace."""
    for number in range(7):
        (tmp_path / f"letter-{number}.txt").touch()
    with pytest.raises(UserError, match="is not empty") as caught:
        RunDir.begin(tmp_path)
    assert caught.value.where == ", ".join(f"letter-{n}.txt" for n in range(5)) + " and 2 more"
    assert "--out" in (caught.value.fix or "")
    assert not (tmp_path / ".lock").exists()


def test_a_run_that_ended_before_it_wrote_anything_can_be_begun_again(tmp_path):
    """A refused plan must not cost the folder's name."""
    RunDir.begin(tmp_path / "run").close()
    RunDir.begin(tmp_path / "run").close()


@pytest.mark.parametrize("is_there", [True, False])
def test_a_run_that_is_refused_before_its_first_step_leaves_nothing_of_its_own(tmp_path, is_there):
    """The corrected command must not be told that a run lies there; a corpus made beside it is no part of the run."""
    folder = tmp_path / "run"
    if is_there:
        folder.mkdir()
    for _ in range(2):
        with pytest.raises(UserError, match="no layer"), RunDir.begin(folder) as run:
            names = ("plan.json", "config.yaml", "documents.tsv", "events.jsonl", "samples.jsonl", "healing.jsonl")
            for path in (run.path / name for name in names):
                path.touch()
            (run.path / "checkpoints").mkdir()
            raise UserError("no layer `q_projj`")
        assert folder.exists() == is_there
        assert not is_there or [entry.name for entry in folder.iterdir()] == [".lock"]
    with pytest.raises(UserError), RunDir.begin(folder) as run:
        (folder / "corpus").mkdir()
        raise UserError("no layer `q_projj`")
    assert (folder / "corpus").is_dir()


def _begin(path):
    run = RunDir.begin(path)
    (run.path / "plan.json").write_text("{}")
    return run


def test_a_run_may_find_its_own_corpus_in_its_folder_and_nothing_else(tmp_path, monkeypatch):
    """A run that was refused leaves the corpus it made there, and the corrected command was refused for it."""
    monkeypatch.chdir(tmp_path)
    for name in ("run/data/corpus", "run/.tunewell"):
        Path(name).mkdir(parents=True)
    RunDir.begin(Path("run"), corpus=tmp_path / "run" / "data" / "corpus").close()
    for corpus in (None, Path("corpus"), Path("run"), Path("run/other")):
        with pytest.raises(UserError, match="not empty"):
            RunDir.begin(Path("run"), corpus=corpus)
    Path("run/notes.txt").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        RunDir.begin(Path("run"), corpus=Path("run/data/corpus"))


def test_what_was_trained_or_broken_by_a_bug_stays(tmp_path):
    """What a person mends costs nothing to begin again; steps do, and a bug has to be looked into."""
    with pytest.raises(UserError), _begin(tmp_path / "stepped") as run:
        run.keep()
        raise UserError("the disk is full")
    with pytest.raises(ZeroDivisionError), _begin(tmp_path / "bug"):
        raise ZeroDivisionError
    _begin(tmp_path / "resumed").close()
    with pytest.raises(UserError), RunDir.reopen(tmp_path / "resumed"):
        raise UserError("another learning rate")
    assert all((tmp_path / name / "plan.json").exists() for name in ("stepped", "bug", "resumed"))


@pytest.mark.parametrize("name", ["run", "nothing"])
def test_going_on_with_no_run_is_refused(tmp_path, name):
    """`--resume` in the wrong folder must not start something new there."""
    (tmp_path / "run").mkdir()
    with pytest.raises(UserError, match="there is no run") as caught:
        RunDir.reopen(tmp_path / name)
    assert "without `--resume`" in (caught.value.fix or "")
    assert not (tmp_path / "nothing").exists()


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    """Not with a traceback."""
    (tmp_path / "run").touch()
    with pytest.raises(UserError, match="is a file"):
        RunDir.begin(tmp_path / "run")


@pytest.mark.parametrize("enter", [RunDir.begin, RunDir.reopen])
def test_a_second_run_is_refused_and_told_who_holds_the_folder_since_when(tmp_path, holder, enter):
    """Two runs in one folder delete each other's checkpoints."""
    with pytest.raises(UserError, match="another process is training in") as caught:
        enter(tmp_path / "run")
    assert (caught.value.where or "").startswith(f"process {holder.pid}, since 20")


def test_a_killed_owner_leaves_no_lock(tmp_path, holder):
    """A lock that has to be deleted by hand is deleted at the wrong time."""
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    RunDir.reopen(tmp_path / "run").close()


def test_one_process_cannot_hold_a_folder_twice(tmp_path):
    """A notebook starts a second run beside the first more easily than a shell."""
    with RunDir.begin(tmp_path / "run") as run:
        run.write("plan.json", "{}")
        with pytest.raises(UserError, match="another process is training"):
            RunDir.reopen(tmp_path / "run")
    RunDir.reopen(tmp_path / "run").close()


@pytest.mark.parametrize("call", ["open", "mkdir", "write", "fsync"])
@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_folder_that_cannot_be_written_is_refused_before_the_first_step(tmp_path, monkeypatch, call, number):
    """Finding out at the first checkpoint costs all the steps before it."""

    def fail(*arguments, **options):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        with pytest.raises(UserError, match="cannot be written") as caught:
            RunDir.begin(tmp_path / "run")
    assert os.strerror(number) in caught.value.what
    assert "--out" in (caught.value.fix or "")
    RunDir.begin(tmp_path / "run").close()


def test_texts_of_a_run_are_written_without_secrets(tmp_path, monkeypatch):
    """A README is made to be shown."""
    monkeypatch.setenv("TRACKER_API_KEY", "s3cret-tracker")
    with RunDir.begin(tmp_path / "run") as run:
        run.write("README.md", "logged in with s3cret-tracker\n")
        assert (run.path / "README.md").read_text() == "logged in with [redacted]\n"


@pytest.mark.parametrize("name", [".probe.123", ".plan.json.123.tmp"])
def test_a_folder_with_what_a_killed_process_left_can_be_used(tmp_path, name):
    """A kill while the folder was tried left a file, and the folder was then said to be not empty."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").touch()
    (tmp_path / "run" / name).write_text("half")
    with RunDir.begin(tmp_path / "run"):
        assert not (tmp_path / "run" / name).exists()
