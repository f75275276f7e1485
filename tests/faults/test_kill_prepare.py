"""Killed at any moment, a prepare leaves the old corpus, the new one or none; the next run ends as if nothing was."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from fault_points import REMOVALS, WRITES, Killed, failing, planned_once

from corpora import prepare_in, rows_file, tree
from tunewell import open_corpus
from tunewell.core.errors import UserError

# Loads everything once and then forks, so that each moment costs a prepare and not a start of Python too.
SERVER = """
import os, sys
from tunewell.workflows.prepare import prepare
for line in sys.stdin:
    if line == "wait\\n":
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    model, data, out = line.rstrip("\\n").split("\\t")
    child = os.fork()
    if not child:
        prepare(model=model, data=data, out=out)
        os._exit(0)
    print(child, flush=True)
"""


@dataclass
class Preparer:
    """A process that prepares in children of its own, which can be killed."""

    process: subprocess.Popen[str]
    model: Path

    def start(self, folder: Path) -> int:
        """Begin to prepare; give the process number, which stays the child's own until `exit_code` is asked for."""
        return self._ask(f"{self.model}\t{folder / 'rows.jsonl'}\t{folder / 'corpus'}")

    def exit_code(self) -> int:
        return self._ask("wait")

    def _ask(self, line: str) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(line, file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())


@pytest.fixture
def preparer(tiny_model):
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield Preparer(process, tiny_model)
    process.kill()
    process.communicate()


def whole_corpus(folder: Path) -> dict[str, bytes] | None:
    """Read the corpus if it can be opened: what opens must also be whole."""
    try:
        open_corpus(folder / "corpus")
    except UserError:
        return None
    open_corpus(folder / "corpus", verify=True)
    return tree(folder / "corpus")


def leftovers(folder: Path) -> list[str]:
    work = folder / ".tunewell" / "prepare-corpus"
    return [name.name for name in folder.iterdir() if name.name.startswith(".corpus")] + [
        name.name for name in work.iterdir() if name.name not in ("lock", "parts")
    ]


HELD_OUT = "data.held_out=0.1"
"""With `auto`, what an old corpus holds out stays held out, so that a corpus without an old one is another one."""


def make_start(folder: Path, model: Path, number: int, *sets: str) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Lay an old corpus and the rows for a new one into `folder / "start"`; give both corpora's files."""
    start = folder / "start"
    rows = rows_file(start / "rows.jsonl", number // 2, first=number)
    old = tree(prepare_in(start, model, rows, *sets).corpus)
    shutil.rmtree(start / ".tunewell")  # so that all of it has to be tokenised
    rows_file(rows, number)
    undisturbed = shutil.copytree(start, folder / "undisturbed")
    return old, tree(prepare_in(undisturbed, model, undisturbed / "rows.jsonl", *sets).corpus)


def kill_at_random_moments(preparer: Preparer, folder: Path, *, rows: int, moments: int, seconds: float) -> None:
    """Kill a prepare at moments spread over its whole duration, and finish each by a second run."""
    old, new = make_start(folder, preparer.model, rows)
    started = time.monotonic()
    shutil.copytree(folder / "start", folder / "timed")
    begin = time.monotonic()
    preparer.start(folder / "timed")
    assert preparer.exit_code() == 0
    duration = time.monotonic() - begin
    chance = random.Random(7)
    order = chance.sample(range(moments), moments)
    seen = {"old": 0, "new": 0, "none": 0, "killed": 0}
    for number, slot in enumerate(order):
        if time.monotonic() - started > seconds:
            assert number >= 5, "the machine is too slow for this test to mean anything"
            break
        place = shutil.copytree(folder / "start", folder / f"killed-{slot}")
        child = preparer.start(place)
        time.sleep((slot + chance.random()) / moments * duration)
        os.kill(child, signal.SIGKILL)
        was_killed = preparer.exit_code() == -signal.SIGKILL
        seen["killed"] += was_killed
        if not was_killed:
            duration *= 0.8  # the timed one was slow by chance: the moments are to be spread over what it takes now
        found = whole_corpus(place)
        assert found in (old, new, None), slot
        seen["none" if found is None else "new" if found == new else "old"] += 1
        result = prepare_in(place, preparer.model, place / "rows.jsonl")
        assert tree(result.corpus) == new, slot
        assert leftovers(place) == [], slot
        shutil.rmtree(place)
    assert seen["killed"] >= 4, seen


@pytest.mark.slow
@pytest.mark.faults
def test_kill_9_at_random_moments_never_breaks_a_corpus(preparer, tmp_path):
    """Power buttons, out-of-memory killers and closed laptops choose their own moment."""
    kill_at_random_moments(preparer, tmp_path, rows=3_000, moments=10, seconds=16)


@pytest.mark.slow
def test_kill_9_at_twenty_random_moments_of_a_longer_prepare(preparer, tmp_path):
    """The bar: twenty of twenty end byte-identical to an undisturbed run."""
    kill_at_random_moments(preparer, tmp_path, rows=20_000, moments=20, seconds=3_600)


def moments(step, seen):
    """Yield every so-manyth moment up to 1,000, and every one between the old corpus and the new one.

    `seen` has what was found at each moment so far.
    """
    for late in range(0, 1_000, step):
        yield late
        if step > 1 and late >= step and seen[late - step] != seen[late]:
            yield from range(late - step + 1, late)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("has_old", "step"),
    [(True, 4), (False, 4), *(pytest.param(old, 1, marks=pytest.mark.faults) for old in (True, False))],
)
def test_ended_at_any_touch_of_the_disk_the_next_run_ends_as_if_nothing_was(tiny_model, tmp_path, has_old, step):
    """Random moments miss the short ones: `make faults` ends a run at every write, flush, move and removal.

    By default every fourth is the last one once, and each around the exchange of the old corpus for the new one.
    """
    old, new = make_start(tmp_path, tiny_model, 24, HELD_OUT)
    if not has_old:
        shutil.rmtree(tmp_path / "start" / "corpus")
    rows, place = tmp_path / "start" / "rows.jsonl", tmp_path / "place"
    seen: dict[int, str] = {}
    with planned_once():
        for at in moments(step, seen):
            shutil.copytree(tmp_path / "start", place)
            with failing(at, WRITES + REMOVALS, Killed):
                try:
                    prepare_in(place, tiny_model, rows, HELD_OUT)
                    break
                except Killed:
                    pass
            found = whole_corpus(place)
            assert found in ((old, new, None) if has_old else (new, None)), at
            seen[at] = "none" if found is None else "new" if found == new else "old"
            assert tree(prepare_in(place, tiny_model, rows, HELD_OUT).corpus) == new, at
            assert leftovers(place) == [], at
            shutil.rmtree(place)
    assert max(seen) > 60
    states = [seen[at] for at in sorted(seen)]
    assert states == sorted(states, key=["old", "none", "new"].index), "the old one, for one move nothing, the new one"
    assert states.count("none") == 1 if has_old else "old" not in states
