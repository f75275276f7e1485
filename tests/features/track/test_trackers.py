"""Trackers: the process that follows a run sends each step once, through rewinds, crashes, hangs and dead servers."""

import importlib.util
import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tunewell.cli.main import main
from tunewell.config.extensions import TRACKERS, TrackerEntry
from tunewell.config.load import load_config
from tunewell.core.errors import UserError
from tunewell.features.track.start import require_trackers

FOLDER = Path(__file__).parent
TOYS = FOLDER.parents[1] / "extending"
FOLLOW = "tunewell.features.track.follow"
PYTHON = os.environ.get("TUNEWELL_TRACK_PYTHON")
"""The Python of an environment with tensorboard, wandb and mlflow, for the tests that read back."""


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = dict(TRACKERS._entries)
    TRACKERS.add(TrackerEntry("toy", "a toy", "toy_tracker:ToyTracker"))
    path = os.pathsep.join([str(TOYS), str(FOLDER.parents[2] / "src"), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    yield
    TRACKERS._entries = before


class FakeRun:
    """A run folder that is written as a run writes it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        chosen = {"value": 20, "because": "x"}
        plan = {"model": "a/model", "config": {"train": {"learning_rate": 0.1}}, "num_steps": chosen}
        (folder / "plan.json").write_text(json.dumps(plan))
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": "2026-01-01"}
        (folder / ".lock").write_text(json.dumps(owner))
        (folder / "events.jsonl").touch()

    def steps(self, first: int, last: int, *, salt: float = 0.0) -> None:
        with (self.folder / "events.jsonl").open("a") as log:
            for step in range(first, last + 1):
                loss = "nan" if step == 3 else 2.0 - step / 10 + salt
                event = {"kind": "step", "step": step, "loss": loss, "tokens": 10, "was_skipped": False}
                event |= {"seconds": 0.5 + salt}  # no two steps take the same time
                log.write(json.dumps(event) + "\n")

    def evaluated(self, step: int, loss: float) -> None:
        with (self.folder / "events.jsonl").open("a") as log:
            log.write(json.dumps({"kind": "held_out", "step": step, "loss": loss}) + "\n")

    def rewind(self, step: int) -> None:
        path = self.folder / "events.jsonl"
        lines = [line for line in path.read_text().splitlines() if json.loads(line)["step"] <= step]
        path.with_name("new").write_text("".join(f"{line}\n" for line in lines))
        path.with_name("new").replace(path)
        with (self.folder / "healing.jsonl").open("a") as log:
            log.write(json.dumps({"step": step, "action": "rewind", "words": f"back to {step}"}) + "\n")

    def end(self, status: str = "finished") -> None:
        (self.folder / "outcome.json").write_text(json.dumps({"status": status}))
        (self.folder / ".lock").write_text("")

    def sent(self, name: str = "loss") -> list[tuple[int, Any]]:
        return [(row["step"], row["values"][name]) for row in self.rows() if name in row.get("values", {})]

    def rows(self) -> list[dict[str, Any]]:
        path = self.folder / "track" / "toy.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return FakeRun(tmp_path / "run")


def start(run: FakeRun, *flags: str, **environment: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", FOLLOW, str(run.folder), "toy", "toy_tracker:ToyTracker", *flags]
    return subprocess.Popen(command, env={**os.environ, **environment})


def wait_for(is_true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline, "the tracker did not do it in time"
        time.sleep(0.02)


@pytest.mark.long
def test_a_live_run_is_followed_through_a_rewind_and_a_kill(run: FakeRun) -> None:
    """Each step is sent once, NaN stays NaN, repeated steps are a new segment, and a killed tracker catches up."""
    run.steps(1, 5)
    tracker = start(run)
    wait_for(lambda: len(run.sent()) == 5)
    run.rewind(2)
    run.steps(3, 4, salt=0.5)
    wait_for(lambda: len(run.sent()) == 7)
    wait_for(lambda: (run.folder / "track" / "toy.seen").stat().st_size == 8 * 4)
    tracker.kill()
    tracker.wait()
    run.steps(5, 7, salt=0.5)
    run.evaluated(7, 1.25)
    run.end()
    assert start(run).wait(60) == 0
    values = [(1, 1.9), (2, 1.8), (3, "nan"), (4, 1.6), (5, 1.5), (3, "nan"), (4, 2.1), (5, 2.0), (6, 1.9), (7, 1.8)]
    assert run.sent() == [(step, value if value == "nan" else pytest.approx(value)) for step, value in values]
    assert run.sent("held_out_loss") == [(7, 1.25)]
    assert run.sent("rewinds") == [(2, 1.0)] and run.sent("segment") == [(2, 1.0)]
    points = [row for row in run.rows() if "number" in row]
    assert [row["number"] for row in points] == list(range(len(points))), "the count must increase over sessions"
    assert [row["segment"] for row in points if "loss" in row["values"]] == [0] * 5 + [1] * 5
    assert run.rows()[-1] == {"close": "finished"}
    assert run.rows()[0]["settings"]["train.learning_rate"] == 0.1


@pytest.mark.long
def test_a_server_that_is_down_gets_everything_later(run: FakeRun, tmp_path: Path) -> None:
    """While it refuses, nothing is lost; when it answers, each step arrives once."""
    down = tmp_path / "down"
    down.touch()
    run.steps(1, 3)
    tracker = start(run, TOY_REFUSES=str(down))
    wait_for(lambda: run.rows())
    run.steps(4, 6)
    assert run.sent() == []
    down.unlink()
    run.end()
    assert tracker.wait(60) == 0
    assert [step for step, _ in run.sent()] == [1, 2, 3, 4, 5, 6]


def test_older_runs_are_sent_by_the_command(
    run: FakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged line costs that line only; a second call sends nothing twice; a refusing server is an error."""
    run.steps(1, 4)
    with (run.folder / "events.jsonl").open("a") as log:
        log.write('{"kind": "step", "st\n{"kind": "step", "step": 5, "loss": 1')  # damaged, and half-written
    run.end("stopped")
    for words in ("sent 4 new points", "nothing new to send"):
        assert main(["track", str(run.folder), "--to", "toy"]) == 0
        assert words in capsys.readouterr().out
    assert [step for step, _ in run.sent()] == [1, 2, 3, 4]
    assert run.rows()[-1] == {"close": "stopped"}
    (tmp_path / "down").touch()
    monkeypatch.setenv("TOY_REFUSES", str(tmp_path / "down"))
    run.steps(5, 6)
    capsys.readouterr()
    assert main(["track", str(run.folder), "--to", "toy"]) == 2
    shown = capsys.readouterr().err
    assert "does not answer" in shown and "sending" in shown
    for words in (["nowhere", "--to", "toy"], [str(run.folder), "--to", "toi"]):
        assert main(["track", *words]) == 2


@pytest.mark.long
def test_two_followers_do_not_send_a_run_twice(run: FakeRun) -> None:
    """The second finds the lock of the first."""
    run.steps(1, 2)
    first = start(run)
    wait_for(lambda: len(run.sent()) == 2)
    second = start(run)
    assert second.wait(60) == 2
    run.end()
    assert first.wait(60) == 0
    assert [step for step, _ in run.sent()] == [1, 2]


def test_a_missing_package_is_told_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after an hour of training, in a log that nobody reads."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="wandb"):
        require_trackers(["wandb"], None)
    with pytest.raises(UserError, match="no Python"):
        require_trackers(["wandb"], "/nowhere/python")
    require_trackers(["wandb"], sys.executable)
    require_trackers([], "/nowhere/python")


def test_report_to_is_an_alias() -> None:
    """The forms of other trainers: one name, a list, `none`."""
    for value, names in (("wandb", ("wandb",)), ("[mlflow, toy]", ("mlflow", "toy")), ("none", ()), ("[none]", ())):
        assert load_config(sets=[f"report_to={value}"], has_file=False).config.track == names
    with pytest.raises(UserError, match="tensorbord"):
        load_config(sets=["track=[tensorbord]"], has_file=False)


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
@pytest.mark.slow
def test_real_trackers_read_back_each_step_once(run: FakeRun, name: str, tmp_path: Path) -> None:
    """A run with a rewind, read with the tracker's own package: raw values, NaN, and the repeated steps."""
    python = PYTHON or sys.executable
    if PYTHON is None and importlib.util.find_spec(TRACKERS.entry(name).module) is None:
        pytest.skip(f"{name} is not installed; TUNEWELL_TRACK_PYTHON names a Python that has it")
    store = os.environ.get("MLFLOW_TEST_URI") or f"file:{tmp_path}/mlflow"
    environment = {
        **os.environ,
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": store,
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }
    environment["MLFLOW_EXPERIMENT_NAME"] = tmp_path.name
    command = [python, "-m", FOLLOW, str(run.folder), name, TRACKERS.entry(name).path]
    run.steps(1, 5)
    tracker = subprocess.Popen(command, env=environment)
    seen = run.folder / "track" / f"{name}.seen"
    wait_for(lambda: seen.is_file() and seen.stat().st_size == 8 * 5)
    run.rewind(2)
    run.steps(3, 6, salt=0.5)
    run.evaluated(6, 1.25)
    run.end()
    assert tracker.wait(120) == 0
    place = store if name == "mlflow" else str(run.folder / "track" / name)
    reader = [python, str(FOLDER / "read_trackers.py"), name, place]
    done = subprocess.run(reader, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    losses = [(metric.rpartition("/")[2], step, value) for metric, step, value in rows]
    losses = sorted((step, value) for metric, step, value in losses if metric == "loss" and not math.isnan(value))
    first, second = [(1, 1.9), (2, 1.8), (4, 1.6), (5, 1.5)], [(4, 2.1), (5, 2.0), (6, 1.9)]
    expected = sorted([*first, *second])
    assert [step for step, _ in losses] == [step for step, _ in expected]
    assert [value for _, value in losses] == pytest.approx([value for _, value in expected])
    assert sum(step == 3 and math.isnan(value) for metric, step, value in rows if metric.endswith("loss")) == 2
    assert [(step, value) for metric, step, value in rows if metric.endswith("held_out_loss")] == [(6, 1.25)]
    assert (2, 1.0) in [(step, value) for metric, step, value in rows if metric.endswith("rewinds")]
