"""A run that is killed, crashes or hangs goes on by itself; one that asked to end is let go. Row 17.

Most of it is tried on small stand-ins for a run, which take a step in a hundredth of a second; one real run is killed
by default, and `make faults` also hangs and crashes one.
"""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from corpora import write_rows
from tunewell.config.rules import Healing
from tunewell.records.events import read_events
from tunewell.records.healing import read_healing
from tunewell.workflows.supervise import _Ear, supervise

STAND_IN = """
import json, os, signal, sys, time
from pathlib import Path
folder, begin, pulse = Path(sys.argv[1]), sys.argv[2] == "again", int(sys.argv[3].split(",")[1])
log = folder / "events.jsonl"
first = len(log.read_bytes().splitlines()) + 1 if begin and log.exists() else 1
with (folder / "starts").open("a") as file: file.write("x")
starts = len((folder / "starts").read_text())
def steps(last):
    for step in range(first, last + 1):
        with log.open("a") as file: file.write(json.dumps({"kind": "step", "step": step, "loss": 1.0}) + "\\n")
        os.write(pulse, b"step 0.01\\n")
        time.sleep(0.01)
"""


@pytest.fixture
def watched(tmp_path: Path) -> Any:
    """Supervise a stand-in whose last lines are given; gives the exit code and what was said."""

    def run(script: str, **rules: Any) -> tuple[int, list[str]]:
        path = tmp_path / "stand_in.py"
        path.write_text(STAND_IN + textwrap.dedent(script))
        told: list[str] = []

        def line(is_again: bool, handles: str) -> list[str]:
            return [sys.executable, str(path), str(tmp_path), "again" if is_again else "new", handles]

        code = supervise(line, folder=tmp_path, rules=Healing(hang_seconds=0.3, **rules), tell=told.append)
        return code, told

    return run


@pytest.mark.parametrize("code", [0, 2, 3, 4, 130, 143])
def test_an_end_of_its_own_is_an_end(watched: Any, tmp_path: Path, code: int) -> None:
    assert watched(f"steps(3); sys.exit({code})") == (code, [])
    assert (tmp_path / "starts").read_text() == "x" and not (tmp_path / "healing.jsonl").exists()


@pytest.mark.parametrize(
    ("end", "name", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed", "memory"),
        ("os.abort()", "crashed", "SIGABRT"),
        ("sys.exit(1)", "crashed", "exit code 1"),
        ("time.sleep(60)", "hung", "did nothing"),
    ],
)
def test_what_ends_a_run_once_does_not_end_it(watched: Any, tmp_path: Path, end: str, name: str, words: str) -> None:
    code, told = watched(f"steps(5 if starts == 1 else 9)\nif starts == 1: {end}")
    assert code == 0 and len(told) == 1 and words in told[0] and "1 of 3" in told[0]
    [entry] = read_healing(tmp_path)
    assert (entry.step, entry.name, entry.action) == (5, name, "restart")
    assert [event["step"] for event in read_events(tmp_path / "events.jsonl")] == list(range(1, 10))


def test_the_same_step_is_tried_four_times_in_all(watched: Any, tmp_path: Path) -> None:
    code, told = watched("steps(5); os.abort()")
    assert code == 1 and (tmp_path / "starts").read_text() == "xxxx"
    assert "3 times at the same step" in told[-1]
    assert [entry.action for entry in read_healing(tmp_path)] == [*["restart"] * 3, "stop"]


def test_a_run_that_gets_further_each_time_is_not_given_up(watched: Any, tmp_path: Path) -> None:
    code, _ = watched("steps(starts * 2)\nif starts < 7: os.abort()")
    assert code == 0 and len((tmp_path / "starts").read_text()) == 7


@pytest.mark.parametrize("rules", [{}, {"on": False}])
def test_what_never_took_a_step_or_may_not_be_healed_is_not_started_again(
    watched: Any, tmp_path: Path, rules: dict[str, Any]
) -> None:
    code, told = watched("steps(0 if not sys.argv[4:] else 5); os.abort()", **rules)
    assert code == 1 and (tmp_path / "starts").read_text() == "x" and "SIGABRT" in told[0]


def test_a_signal_is_handed_on_once(watched: Any, tmp_path: Path) -> None:
    script = """
    seen = []
    signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    steps(3)
    while not seen: time.sleep(0.01); os.write(pulse, b"alive\\n")
    time.sleep(0.2)
    (folder / "seen").write_text(str(len(seen)))
    sys.exit(143)
    """

    def ask() -> None:
        while not (tmp_path / "events.jsonl").exists():
            time.sleep(0.01)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask).start()
    assert watched(script) == (143, []) and (tmp_path / "seen").read_text() == "1"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_patience_is_three_steps_and_more_and_longer_for_other_work() -> None:
    ear = _Ear(60.0)
    ear.hear(b"stage\nalive\n")
    assert ear.patience is None, "loading may take any time"
    ear.hear(b"step 2.0\nstep 4.0\nste")
    assert ear.patience == 60 + 3 * 3.0
    ear.hear(b"p 4.0\nstage\n")
    assert ear.patience == 20 * (60 + 3 * 4.0)
    ear.hear(b"alive\n")
    assert ear.patience > 1000, "still at it"


@pytest.fixture
def project(tmp_path: Path, tiny_model: Path) -> Path:
    rows = [{"instruction": f"What is {n} plus {n}?", "output": f"It is {2 * n}."} for n in range(40)]
    write_rows(tmp_path / "rows.jsonl", rows)
    settings = {
        "model": "preset:tiny-1m",
        "tokenizer": str(tiny_model),
        "method": {"kind": "full"},
        "data": {"sources": "rows.jsonl", "held_out": 0.2},
        "train": {"max_steps": 12, "batch_documents": 4, "threads": 1, "learning_rate": 5e-3},
        "evaluate": {"every_steps": 6, "samples": 0},
        "checkpoints": {"every_steps": 3},
        "verdict": {"after_training": False},
        "healing": {"hang_seconds": 5},
    }
    (tmp_path / "tunewell.yaml").write_text(json.dumps(settings))
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("kill", "killed"),
        pytest.param("hang", "hung", marks=pytest.mark.faults),
        pytest.param("crash", "crashed", marks=pytest.mark.faults),
    ],
)
def test_a_real_run_goes_on_where_it_died(project: Path, record_property: Any, kind: str, name: str) -> None:
    line = [sys.executable, "-m", "tunewell", "train", "--json", "--enable-fault-injection"]
    planted = {"CI": "1", "TUNEWELL_FAULTS": f"{kind}@step:step=7,marker={project / 'done'}"}
    began = time.monotonic()
    done = subprocess.run(line, cwd=project, capture_output=True, text=True, check=False, env=os.environ | planted)
    told = json.loads(done.stdout)
    record_property(
        "fault",
        {
            "row": 17,
            "fault": f"{kind} at step 8",
            "seed": 0,
            "ended": told["status"],
            "exit_code": done.returncode,
            "seconds": round(time.monotonic() - began, 1),
        },
    )
    assert done.returncode == 0, done.stderr
    assert told["status"] == "finished" and told["steps"] == 12
    assert name in [entry["name"] for entry in told["healing"]]
    assert "supervisor: the run" in done.stderr and "started again" in done.stderr
    steps = [event["step"] for event in read_events(project / "run" / "events.jsonl") if event["kind"] == "step"]
    assert steps == list(range(1, 13))
    if kind == "hang":
        assert "in before_step" in (project / "run" / "stacks.txt").read_text()


def test_a_run_whose_supervisor_is_killed_saves_and_leaves(project: Path) -> None:
    """Whoever ends the command with kill -9 means the run."""
    line = [sys.executable, "-m", "tunewell", "train", "--set", "train.max_steps=5000"]
    process = subprocess.Popen(line, cwd=project, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    log = project / "run" / "events.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (log.is_file() and len(log.read_bytes().splitlines()) > 8):
        time.sleep(0.02)
    process.kill()
    process.wait()
    while time.monotonic() < deadline and not (project / "run" / "outcome.json").is_file():
        time.sleep(0.05)
    outcome = json.loads((project / "run" / "outcome.json").read_text())
    assert outcome["status"] == "interrupted" and outcome["signal"] == "SIGTERM"
