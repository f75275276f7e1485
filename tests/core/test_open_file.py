"""Files are opened as regular files: never through a link that would be written, never a pipe or a device."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tunewell.core.errors import UserError
from tunewell.core.files import FolderLock, open_file, read_bytes, read_text, sha256_file, write_atomic, write_synced
from tunewell.records.events import EventLog
from tunewell.runs.heartbeat import Pulse

DIARY = "my diary\nwithout a last line end"
WRITERS = {
    "lock": lambda path: FolderLock.take(path, doing="testing").release(),
    "log": lambda path: EventLog(path).append({"step": 1}),
    "append": lambda path: open_file(path, "ab"),
    "replace": lambda path: open_file(path, "w"),
    "update": lambda path: open_file(path, "r+b"),
    "staged": lambda path: write_synced(path, b"new"),
    "pulse": lambda path: Pulse().open(path.parent) if path.name == ".pulse" else open_file(path, "w"),
}


@pytest.fixture
def diary(tmp_path: Path) -> Path:
    """A file of the user."""
    path = tmp_path / "diary.txt"
    path.write_text(DIARY)
    return path


@pytest.mark.parametrize("path", ["/dev/null", "/proc/self/fd/{reader}"])
def test_nobody_is_told_to_delete_a_device(path: str) -> None:
    """A pipe of the shell was refused with `delete /dev/fd/63`."""
    reader, writer = os.pipe()
    with pytest.raises(UserError) as error:
        read_bytes(Path(path.format(reader=reader)))
    os.close(reader)
    os.close(writer)
    assert error.value.fix == "copy it to a file, and give that file"


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("has_target", [True, False])
def test_nothing_is_written_through_a_link(writer, has_target, diary, tmp_path):
    """A lock that is a link emptied any file of the user; an unpacked archive can contain such a link."""
    target = diary if has_target else tmp_path / "absent"
    link = tmp_path / ("lock" if writer != "pulse" else ".pulse")
    link.symlink_to(target)
    with pytest.raises(UserError, match="is a link to") as caught:
        WRITERS[writer](link)
    assert str(target) in caught.value.what and f"delete the link `{link}`" in (caught.value.fix or "")
    assert diary.read_text() == DIARY and target.exists() == has_target and link.is_symlink()


@pytest.mark.parametrize("writer", ["lock", "log", "replace", "staged", "pulse"])
def test_a_hard_link_does_not_reach_its_other_name(writer, diary, tmp_path):
    """A copy made with `cp -al` shares its files; the other name may also be any file of the user."""
    path = tmp_path / ("lock" if writer != "pulse" else ".pulse")
    os.link(diary, path)
    if writer in ("lock", "log"):
        with pytest.raises(UserError, match=r"is not a (lock|tunewell log)"):
            WRITERS[writer](path)
    else:
        WRITERS[writer](path)
    assert diary.read_text() == DIARY


@pytest.mark.parametrize("writer", ["lock", "log"])
def test_a_lock_or_log_that_holds_something_else_is_left(writer, diary):
    """Its content was cut off, up to the last line end or as a whole."""
    with pytest.raises(UserError, match=r"is not a (lock|tunewell log)") as caught:
        WRITERS[writer](diary)
    assert "move" in (caught.value.fix or "") and diary.read_text() == DIARY


@pytest.mark.parametrize("act", [*WRITERS.values(), read_bytes, read_text, sha256_file])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_or_a_device_is_refused_and_never_waited_for(act, kind, tmp_path):
    """A report that is a pipe without a writer made `runs` hang. Reading a device never ends."""
    path = tmp_path / ".pulse"
    os.mkfifo(path)
    if kind == "device":
        path = Path(os.devnull)
    with pytest.raises(UserError, match="a pipe, a socket or a device") as caught:
        act(path)
    assert caught.value.fix
    assert not stat.S_ISREG(path.stat().st_mode)


def test_a_reader_that_tolerates_damage_tolerates_a_pipe(tmp_path):
    """A pipe in one run must not hide the other runs in the list."""
    os.mkfifo(tmp_path / "report.json")
    with pytest.raises(OSError, match="pipe") as caught:
        read_bytes(tmp_path / "report.json")
    assert "pipe" in caught.value.strerror  # what most handlers show


def test_an_input_may_be_a_link(diary, tmp_path):
    """Rows and models are often links into a cache."""
    (tmp_path / "rows").symlink_to(diary)
    assert read_text(tmp_path / "rows") == DIARY


def test_an_atomic_write_does_not_use_a_link_in_the_place_of_its_temporary_file(diary, tmp_path):
    """The name of the temporary file can be guessed."""
    (tmp_path / f".new.{os.getpid()}.tmp").symlink_to(diary)
    write_atomic(tmp_path / "new", "text")
    assert diary.read_text() == DIARY and (tmp_path / "new").read_text() == "text"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("link", "arguments"),
    [
        (".tunewell/prepare-corpus/lock", ["prepare", "--data", "rows.jsonl", "--model", "preset:tiny-1m"]),
        ("index/.lock", ["index", "docs", "--out", "index"]),
        ("run/.lock", ["train", "--resume", "--out", "run", "--no-supervisor"]),
    ],
)
def test_commands_leave_the_target_of_a_link_alone(link, arguments, diary, tmp_path):
    """`ln -s ~/diary.txt .tunewell/prepare-corpus/lock; tunewell prepare` left an empty diary."""
    (tmp_path / "rows.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("# Page\n\nA text.\n")
    (tmp_path / link).parent.mkdir(parents=True)
    (tmp_path / link).symlink_to(diary)
    done = subprocess.run([sys.executable, "-m", "tunewell", *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert diary.read_text() == DIARY
