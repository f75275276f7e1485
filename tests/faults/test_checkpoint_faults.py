"""Killed, out of room, damaged or moved away at any moment, a run keeps a whole checkpoint and knows which it is."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from fault_points import Killed, failing
from write_faults import REMOVALS, WRITES, broken, disk_with

from checkpoint_states import FILES, filled, names, same, state_at
from tunewell.core.errors import UserError
from tunewell.records.checkpoint import DamagedCheckpoint
from tunewell.training.checkpoints import Checkpoints
from tunewell.training.find_checkpoints import find_best

# Loads everything once and forks, so that each killed save costs a save and not a start of Python too.
SERVER = """
import os, sys, time
from pathlib import Path
from checkpoint_states import state_at
from tunewell.training import checkpoints as module
from tunewell.training.checkpoints import Checkpoints
from tunewell.training.signals import Signals
from write_faults import kill_this_process_at

def save_killed(folder, step, call):
    checkpoints = Checkpoints(folder, keep=2, on_trouble=print)
    checkpoints.load(checkpoints.newest())
    kill_this_process_at(int(call))
    checkpoints.save(state_at(int(step)), is_best=True, wait=True)
    return 0

def save_until_released(folder):
    write = module.write_synced

    def write_when_released(path, *parts):
        while not (folder.parent / "released").exists():
            time.sleep(0.01)
        return write(path, *parts)

    module.write_synced = write_when_released
    checkpoints = Checkpoints(folder, keep=2, on_trouble=print)
    with Signals() as signals:
        checkpoints.save(state_at(5))
        while not signals.asked:
            time.sleep(0.01)
        (folder.parent / "asked").touch()
        checkpoints.wait()
        return signals.exit_code

for line in sys.stdin:
    if line == "wait\\n":
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    name, folder, *rest = line.rstrip("\\n").split("\\t")
    child = os.fork()
    if not child:
        os._exit(globals()[name](Path(folder), *rest))
    print(child, flush=True)
"""


@dataclass
class Server:
    """A process that saves in children of its own, which can be killed."""

    process: subprocess.Popen[str]

    def start(self, name: str, folder: Path, *arguments: int) -> int:
        """Begin; give the process number, which stays the child's own until `exit_code` is asked for."""
        return self._ask("\t".join([name, str(folder), *map(str, arguments)]))

    def exit_code(self) -> int:
        return self._ask("wait")

    def _ask(self, line: str) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(line, file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())


@pytest.fixture(scope="module")
def server():
    here = Path(__file__).parent
    paths = [str(here), str(here.parent), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    yield Server(process)
    process.kill()
    process.communicate()


@pytest.fixture
def start(tmp_path):
    """Checkpoints of step 2 (the best), 3 and 4."""
    folder = tmp_path / "start"
    assert filled(folder, [1, 2, 3, 4], best=2) == []
    return folder


def found(folder: Path) -> tuple[int, int]:
    """Open a folder as the next run does; give the newest and the best step, both read whole."""
    checkpoints = Checkpoints(folder, keep=2, on_trouble=lambda message: pytest.fail(message))
    newest, best = checkpoints.newest(), checkpoints.best()
    assert newest is not None and best is not None
    for saved in (newest, best):
        assert same(checkpoints.load(saved), state_at(saved.step))
    assert not [name for name in names(folder) if not name.startswith("step-") or name.endswith(".tmp")]
    return newest.step, best.step


@pytest.mark.slow
@pytest.mark.parametrize("step", [5, 4])
def test_kill_9_at_every_write_flush_move_and_removal_of_a_save(server, start, tmp_path, step):
    """The one before or the new one, each whole, with nothing left over; also when a step is saved again."""
    seen = []
    for call in range(1_000):
        folder = shutil.copytree(start, tmp_path / "killed")
        server.start("save_killed", folder, step, call)
        exit_code = server.exit_code()
        assert exit_code in (0, -signal.SIGKILL)
        seen.append(found(folder))
        shutil.rmtree(folder)
        if exit_code == 0:
            break
    assert len(seen) > 20
    assert set(seen) == {(4, 2), (step, step)}
    assert seen == sorted(seen, key=[(4, 2), (step, step)].index), "the new one stays once it is there"


def test_every_file_is_flushed_before_the_manifest_and_everything_before_the_move(start, monkeypatch):
    """A kill does not show a missing flush, a power cut does: names may reach the disk before the bytes."""
    trace, opened, lock = [], {}, threading.Lock()
    open_, write, fsync, rename = os.open, os.write, os.fsync, os.rename

    def tracing_open(path, flags, *rest, **options):
        handle = open_(path, flags, *rest, **options)
        opened[handle] = os.fspath(path)
        return handle

    def note(what, path):
        with lock:
            trace.append((what, os.path.relpath(path, start)))

    monkeypatch.setattr(os, "open", tracing_open)
    monkeypatch.setattr(os, "write", lambda handle, data: (note("write", opened[handle]), write(handle, data))[1])
    monkeypatch.setattr(os, "fsync", lambda handle: (note("flush", opened[handle]), fsync(handle))[1])
    monkeypatch.setattr(os, "rename", lambda old, new: (note("move", old), rename(old, new))[1])
    Checkpoints(start, keep=9, on_trouble=lambda message: pytest.fail(message)).save(state_at(5), wait=True)
    staged = "step-000005.tmp"
    num_last = 6
    of_files, rest = trace[:-num_last], trace[-num_last:]
    for name in FILES:  # written in parallel, each flushed after its last write
        own = [what for what, path in of_files if path == f"{staged}/{name}"]
        assert own == ["write"] * (len(own) - 1) + ["flush"] and len(own) > 1
    assert {path for _, path in of_files} == {f"{staged}/{name}" for name in FILES}
    assert rest == [
        ("flush", f"{staged}/adapter"),
        ("write", f"{staged}/manifest.json"),
        ("flush", f"{staged}/manifest.json"),
        ("flush", staged),
        ("move", staged),
        ("flush", "."),
    ]


@pytest.mark.slow
def test_ended_at_any_touch_of_the_disk_the_next_run_saves_as_if_nothing_was(start, tmp_path):
    """The same without processes: here the next run goes on, saves the same step and has to end with the same files."""
    shutil.copytree(start, tmp_path / "undisturbed")
    whole = save_next(tmp_path / "undisturbed")
    for at in range(1_000):
        place = shutil.copytree(start, tmp_path / "place")
        with failing(at, WRITES + REMOVALS, Killed):
            try:
                save_next(place)
                break
            except Killed:
                pass
        assert found(place) in ((4, 2), (5, 5)), at
        assert save_next(place) == whole, at
        shutil.rmtree(place)
    assert at > 20


def save_next(folder: Path) -> list[str]:
    checkpoints = Checkpoints(folder, keep=2, on_trouble=lambda message: pytest.fail(message))
    newest = checkpoints.newest()
    assert newest is not None
    checkpoints.load(newest)
    checkpoints.save(state_at(5), is_best=True, wait=True)
    return names(folder)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.8, 0.99])
def test_a_full_disk_costs_the_new_checkpoint_and_nothing_else(start, share):
    """One alert however often it is tried; the part that was written is removed; when there is room, it goes on."""
    before, told = names(start), []
    checkpoints = Checkpoints(start, keep=2, on_trouble=told.append)
    newest = checkpoints.newest()
    assert newest is not None
    checkpoints.load(newest)
    with disk_with(1 << 30) as sizes:
        filled(start.with_name("measured"), [5])
    with disk_with(int(sum(sizes) * share)):
        for step in (5, 6, 7):
            checkpoints.save(state_at(step), wait=True)
            assert names(start) == before
            assert checkpoints.trouble == "the disk is full"
    assert told == [
        "checkpoint `step-000005` was not saved: the disk is full; training continues with the previous one"
    ]
    assert found(start) == (4, 2)
    checkpoints.save(state_at(8), wait=True)
    assert told[1:] == ["checkpoints are saved again, starting with `step-000008`; 3 could not be saved"]
    assert checkpoints.trouble is None
    assert found(start) == (8, 2)


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("places", [[(os, "mkdir")], [(os, "fsync")], [(os, "rename")]], ids=lambda p: p[0][1])
def test_a_folder_that_cannot_be_written_is_tried_three_times_and_told_once(start, number, places, monkeypatch):
    """A network disk that is away for a moment costs nothing; one that stays away is told, and the run goes on."""
    monkeypatch.setattr("tunewell.training.checkpoints._WAIT_SECONDS", 0.001)
    told: list[str] = []
    checkpoints = Checkpoints(start, keep=2, on_trouble=told.append)
    with broken(places, number) as failed:
        checkpoints.save(state_at(5), wait=True)
        checkpoints.save(state_at(6), wait=True)
    assert len(failed) == 6 * (len(FILES) if places == [(os, "fsync")] else 1)  # files are flushed in parallel
    assert len(told) == 1 and os.strerror(number) in told[0]
    assert found(start) == (4, 2)
    told.clear()
    with broken(places, number, times=2):
        checkpoints.save(state_at(7), wait=True)
    assert told == ["checkpoints are saved again, starting with `step-000007`; 2 could not be saved"]
    assert found(start)[0] == 7


def test_a_run_whose_folder_was_moved_away_says_so_and_goes_on(start, monkeypatch):
    """People rename a run's folder while it runs; making a new one in its place would split the run in two."""
    monkeypatch.setattr("tunewell.training.checkpoints._WAIT_SECONDS", 0.001)
    told: list[str] = []
    run = start.parent / "run"
    run.mkdir()
    checkpoints = Checkpoints(run / "checkpoints", keep=2, on_trouble=told.append)
    checkpoints.save(state_at(1), wait=True)
    run.rename(start.parent / "moved")
    checkpoints.save(state_at(2), wait=True)
    assert len(told) == 1 and "No such file or directory" in told[0]
    assert not run.exists()
    (start.parent / "moved").rename(run)
    checkpoints.save(state_at(3), wait=True)
    assert names(run / "checkpoints") == ["step-000001", "step-000003"]


def test_checkpoints_that_were_deleted_under_a_run_are_missed_and_told(start):
    """Nothing is lost silently."""
    told: list[str] = []
    checkpoints = Checkpoints(start, keep=2, on_trouble=told.append)
    shutil.rmtree(start)
    checkpoints.save(state_at(5), wait=True)
    assert told == ["the folder `start` was missing, with all checkpoints; it was created again"]
    assert names(start) == ["step-000005"]


def test_old_checkpoints_that_cannot_be_deleted_are_told_once_each_and_survived(start):
    """A file held open elsewhere must not end a run."""
    told: list[str] = []
    checkpoints = Checkpoints(start, keep=2, on_trouble=told.append)
    with broken([(os, "rmdir")], errno.EBUSY):
        for step in (5, 6, 7):
            checkpoints.save(state_at(step), wait=True)
    newest = checkpoints.newest()
    assert newest is not None and newest.step == 7
    assert [message.split("`")[1] for message in told] == ["step-000003", "step-000004", "step-000005"]
    assert Checkpoints(start, keep=2, on_trouble=told.append) and names(start) == [
        "step-000002",
        "step-000006",
        "step-000007",
    ]


def damages(path: Path, chance: random.Random) -> list[tuple[str, bytes]]:
    """Cut a file at seven places and flip one bit at twenty."""
    data = path.read_bytes()
    size = len(data)
    cuts = [0, 1, 8, size // 4, size // 2, size - 8, size - 1]
    made = [(f"cut at {cut}", data[:cut]) for cut in cuts]
    for _ in range(20):
        at, bit = chance.randrange(size), chance.randrange(8)
        made.append((f"bit {bit} of byte {at}", data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]))
    return made


@pytest.mark.parametrize("file", [*FILES, "manifest.json"])
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_taken(start, file):
    """A flipped bit in a safetensors body loads without an error: only a hash finds it."""
    path, told = start / "step-000004" / file, []
    original = path.read_bytes()
    for what, data in damages(path, random.Random(7)):
        path.write_bytes(data)
        told.clear()
        newest = Checkpoints(start, keep=2, on_trouble=told.append).newest()
        assert newest is not None and newest.step == 3, what
        assert len(told) == 1 and told[0].startswith(f"checkpoint `step-000004` is damaged: `{file}` "), what
    path.write_bytes(original)
    assert found(start) == (4, 2)


@pytest.mark.parametrize("file", [*FILES, "manifest.json"])
def test_a_missing_file_is_named_and_never_resumed_without(start, file):
    """Other trainers go on without the optimizer's state, with another result and no word."""
    told: list[str] = []
    (start / "step-000004" / file).unlink()
    newest = Checkpoints(start, keep=2, on_trouble=told.append).newest()
    assert newest is not None and newest.step == 3
    assert told == [f"checkpoint `step-000004` is damaged: `{file}` is missing; skipped"]


def test_a_run_whose_every_checkpoint_is_damaged_is_not_started_again_from_nothing(start):
    """That would look like going on."""
    for step in (2, 3, 4):
        (start / f"step-00000{step}" / FILES[1]).unlink()
    told: list[str] = []
    with pytest.raises(UserError, match="all checkpoints are damaged") as caught:
        Checkpoints(start, keep=2, on_trouble=told.append).newest()
    assert caught.value.where is not None and caught.value.where.count(FILES[1]) == 3
    assert len(told) == 3


def test_a_file_damaged_between_finding_and_loading_is_still_found_out(start):
    """What is loaded is hashed again, the very bytes that are used."""
    checkpoints = Checkpoints(start, keep=2, on_trouble=lambda message: pytest.fail(message))
    newest = checkpoints.newest()
    assert newest is not None
    path = newest.path / FILES[0]
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    with pytest.raises(DamagedCheckpoint, match="does not match the hash in the manifest"):
        checkpoints.load(newest)


def test_a_checkpoint_renamed_to_another_step_is_no_checkpoint(start):
    """The schedule and the data order hang on the number."""
    (start / "step-000004").rename(start / "step-000009")
    told: list[str] = []
    newest = Checkpoints(start, keep=2, on_trouble=told.append).newest()
    assert newest is not None and newest.step == 3
    assert told == ["checkpoint `step-000009` is damaged: `manifest.json` belongs to step 4; skipped"]


def test_two_whole_ones_stay_even_when_others_are_damaged(start):
    """A damaged checkpoint does not count as one of those that are kept."""
    (start / "step-000004" / FILES[1]).unlink()
    told: list[str] = []
    checkpoints = Checkpoints(start, keep=2, on_trouble=told.append)
    newest = checkpoints.newest()
    assert newest is not None
    checkpoints.load(newest)
    checkpoints.save(state_at(5), wait=True)
    assert names(start) == ["step-000002", "step-000003", "step-000004", "step-000005"]
    checkpoints.save(state_at(6), wait=True)
    assert names(start) == ["step-000002", "step-000005", "step-000006"]


def test_a_damaged_best_is_told_and_not_replaced_by_another(start):
    """The newest would be a fine model, but not the one that was asked for."""
    (start / "step-000002" / FILES[0]).write_bytes(b"")
    told: list[str] = []
    assert find_best(start, on_trouble=told.append) is None
    assert len(told) == 1 and "`step-000002` is damaged" in told[0]


def test_a_disk_that_gives_back_other_bytes_is_found_out_before_the_old_checkpoint_goes(start, monkeypatch):
    """The save is read back: a controller that lies is found out when there is still something to lose."""
    write, told = os.write, []
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, bytes(data[:-1]) + b"?"))
    monkeypatch.setattr("tunewell.training.checkpoints._WAIT_SECONDS", 0.001)
    before = names(start)
    Checkpoints(start, keep=2, on_trouble=told.append).save(state_at(5), wait=True)
    monkeypatch.undo()
    assert len(told) == 1 and "does not contain the bytes" in told[0]
    assert names(start) == before and found(start) == (4, 2)


@pytest.mark.parametrize("twice", [False, True])
def test_a_signal_during_a_save_lets_it_finish_and_a_second_does_not(server, start, twice):
    """Schedulers ask once and then insist."""
    child = server.start("save_until_released", start)
    wait_for(start / "step-000005.tmp")
    os.kill(child, signal.SIGTERM)
    wait_for(start.parent / "asked")
    if twice:
        for _ in range(3):  # on a busy machine, one may arrive while the first is still handled
            os.kill(child, signal.SIGINT)
            time.sleep(0.3)
    else:
        (start.parent / "released").touch()
    assert server.exit_code() == (130 if twice else 143)
    assert found(start) == ((4, 2) if twice else (5, 2))


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} never came"
        time.sleep(0.005)
