"""Trackers: each step is sent once, through rewinds, crashes, hangs and dead servers, and training never waits."""

import importlib.util
import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tunewell.cli.main import main
from tunewell.config.extensions import TRACKERS, TrackerEntry
from tunewell.config.load import load_config
from tunewell.core.errors import UserError
from tunewell.features.track import live
from tunewell.features.track.sender import Sender, require_trackers
from tunewell.records.events import event_line
from tunewell.runs.result import MetricsRecorder
from tunewell.training.events import Evaluated, Rewound, StepTaken

FOLDER = Path(__file__).parent
TOYS = FOLDER.parents[1] / "extending"


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = dict(TRACKERS._entries)
    TRACKERS.add(TrackerEntry("toy", "a toy", "toy_tracker:ToyTracker"))
    monkeypatch.syspath_prepend(str(TOYS))
    monkeypatch.setattr(live, "_WAIT_SECONDS", (0.01,))
    monkeypatch.setattr(live, "_PATIENCE_SECONDS", 30.0)
    yield
    TRACKERS._entries = before


class FakeRun:
    """A run folder that is written as a run writes it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.recorder = folder, MetricsRecorder()
        folder.mkdir()
        chosen = {"value": 20, "because": "x"}
        plan = {"model": "a/model", "config": {"train": {"learning_rate": 0.1}}, "num_steps": chosen}
        (folder / "plan.json").write_text(json.dumps(plan))
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": "2026-01-01"}
        (folder / ".lock").write_text(json.dumps(owner))
        (folder / "events.jsonl").touch()

    def steps(self, first: int, last: int, *, salt: float = 0.0) -> None:
        for step in range(first, last + 1):
            loss = math.nan if step == 3 else 2.0 - step / 10 + salt
            seconds = 0.5 + salt  # no two steps take the same time
            event = StepTaken(step, 0.0, loss, 1.0, 0.1, 10, 10, 1, seconds, None, "hash")
            self._log({"kind": "step", **event.__dict__})
            self.recorder(event)

    def evaluated(self, step: int, loss: float) -> None:
        event = Evaluated(step, loss, 10, 1, 0.5, is_best=True)
        self._log({"kind": "held_out", "step": step, "loss": loss})
        self.recorder(event)

    def _log(self, event: dict[str, Any]) -> None:
        with (self.folder / "events.jsonl").open("ab") as log:
            log.write(event_line(event) + b"\n")

    def rewind(self, step: int) -> None:
        path = self.folder / "events.jsonl"
        lines = [line for line in path.read_text().splitlines() if json.loads(line)["step"] <= step]
        path.with_name("new").write_text("".join(f"{line}\n" for line in lines))
        path.with_name("new").replace(path)
        with (self.folder / "healing.jsonl").open("a") as log:
            log.write(json.dumps({"step": step, "action": "rewind", "words": f"back to {step}"}) + "\n")
        self.recorder(Rewound(step))

    def end(self, status: str = "finished") -> None:
        (self.folder / "outcome.json").write_text(json.dumps({"status": status}))
        (self.folder / ".lock").write_text("")

    def sent(self, name: str = "loss") -> list[tuple[int, Any]]:
        return [(row["step"], row["values"][name]) for row in self.rows() if name in row.get("values", {})]

    def rows(self, key: str = "") -> list[dict[str, Any]]:
        path = self.folder / "track" / "toy.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
        return [row for row in rows if not key or key in row]


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return FakeRun(tmp_path / "run")


def start(run: FakeRun, name: str = "toy") -> Callable[[str], None]:
    """Attach a tracker as a training does. The result ends it, after the run has written its outcome."""
    end = live.start_trackers(run.folder, [name], run.recorder.listeners, run.recorder.note)

    def finish(status: str) -> None:
        end(status)
        run.end(status)

    return finish


def tracker_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("tracker ")]


def wait_for(is_true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline, "the tracker did not do it in time"
        time.sleep(0.02)


def test_a_run_is_sent_through_a_rewind_and_a_resume(run: FakeRun) -> None:
    """Each step is sent once, NaN stays NaN, and repeated steps are a new segment of the same record."""
    end = start(run)
    run.steps(1, 5)
    wait_for(lambda: len(run.sent()) == 5)
    run.rewind(2)
    run.steps(3, 4, salt=0.5)
    end("interrupted")
    end = start(run)
    run.steps(5, 6, salt=0.5)
    run.evaluated(6, 1.25)
    end("finished")
    assert run.rows()[-1] == {"close": "finished"}
    values = [(1, 1.9), (2, 1.8), (3, "nan"), (4, 1.6), (5, 1.5), (3, "nan"), (4, 2.1), (5, 2.0), (6, 1.9)]
    assert run.sent() == [(step, value if value == "nan" else pytest.approx(value)) for step, value in values]
    assert run.sent("held_out_loss") == [(6, 1.25)]
    assert run.sent("rewinds") == [(2, 1.0)] and run.sent("segment") == [(2, 1.0)]
    points = run.rows("number")
    assert [point["number"] for point in points] == list(range(len(points))), "the count must increase over sessions"
    assert [point["segment"] for point in points if "loss" in point["values"]] == [0] * 5 + [1] * 4
    assert run.rows("open")[0]["settings"]["train.learning_rate"] == 0.1
    assert json.loads((run.folder / "track" / "toy.json").read_text())["state"] == {"sessions": 2}
    assert run.recorder.notes == []


def test_a_server_that_is_down_gets_everything_later(
    run: FakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it refuses, training goes on with one note; when it answers, each step arrives once."""
    (down := tmp_path / "down").touch()
    monkeypatch.setenv("TOY_REFUSES", str(down))
    run.steps(1, 3)
    end = start(run)
    wait_for(lambda: run.recorder.notes)
    run.steps(4, 6)
    assert run.sent() == []
    down.unlink()
    end("finished")
    assert [step for step, _ in run.sent()] == [1, 2, 3, 4, 5, 6]
    assert run.recorder.notes == [
        "the tracker `toy` failed, and training goes on: ConnectionError: the server does not answer"
    ]


def test_a_server_that_never_answers_is_named_at_the_end(
    run: FakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run ends as it would without a tracker, and the advised command sends what is missing."""
    (down := tmp_path / "down").touch()
    monkeypatch.setenv("TOY_REFUSES", str(down))
    end = start(run)
    run.steps(1, 2)
    end("finished")
    command = f"tunewell track {run.folder} --to toy"
    assert run.recorder.notes[-1] == f"the tracker `toy` failed; 2 points not sent; `{command}` sends what is missing"
    assert not tracker_threads()
    down.unlink()
    assert main(command.split()[1:]) == 0 and "sent 2 new points" in capsys.readouterr().out


@pytest.mark.parametrize("how", ["hangs", "hangs later", "hangs at the end"])
def test_a_hanging_tracker_never_blocks_a_run(run: FakeRun, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that were not sent are counted, the end waits for a limited time, and no step is lost."""
    monkeypatch.setenv("TOY_TRACKER", how)
    monkeypatch.setattr(live, "_PATIENCE_SECONDS", 0.2)
    end = start(run)
    run.steps(1, 50)
    end("finished")
    num_left = 0 if how == "hangs at the end" else 50
    assert f"has not answered within 0 seconds; {num_left} points not sent" in run.recorder.notes[-1]
    with pytest.raises(UserError, match="another process"):
        Sender(run.folder, "toy")
    monkeypatch.delenv("TOY_TRACKER")
    wait_for(lambda: not tracker_threads())
    assert [step for step, _ in run.sent()] == list(range(1, 51))
    assert run.rows()[-1] == {"close": "finished"}


def test_a_hanging_tracker_does_not_delay_the_end_of_a_command() -> None:
    """The package of a tracker may wait for its server when Python exits."""
    script = """
import atexit, sys, threading, time
from tunewell.cli.main import run
atexit.register(time.sleep, 1000)
threading.Thread(target=time.sleep, args=[1000], name="tracker toy", daemon=True).start()
sys.argv = ["tunewell", "--version"]
run()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.startswith("tunewell ")


def test_secrets_are_not_sent(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name or a setting may contain a token, and so may the error of a server."""
    monkeypatch.setenv("WANDB_API_KEY", "s3cret-0123456789")
    plan = {"model": "https://user:hunter2hunter2@host/m", "config": {"data": {"api_key": "s3cret-0123456789"}}}
    (run.folder / "plan.json").write_text(json.dumps(plan))
    with (run.folder / "healing.jsonl").open("a") as log:
        log.write(json.dumps({"step": 1, "action": "none", "words": "s3cret-0123456789 was refused"}) + "\n")
    start(run)("finished")
    assert "s3cret" not in (text := (run.folder / "track" / "toy.jsonl").read_text()) and "hunter2" not in text
    monkeypatch.setattr(Sender, "catch_up", lambda *_, **__: 1 / int("s3cret-0123456789"))
    start(run)("finished")
    assert "invalid literal" in (notes := "\n".join(run.recorder.notes)) and "s3cret" not in notes


def test_what_the_former_tracker_processes_sent_is_not_sent_again(run: FakeRun) -> None:
    """They wrote the same files, without `num_cut`."""
    run.steps(1, 3)
    with Sender(run.folder, "toy") as sender:
        assert sender.catch_up() == 3
    path = run.folder / "track" / "toy.json"
    path.write_text(
        json.dumps({name: value for name, value in json.loads(path.read_text()).items() if name != "num_cut"})
    )
    run.steps(4, 4)
    with Sender(run.folder, "toy") as sender:
        assert sender.catch_up() == 1
    assert json.loads(path.read_text())["state"] == {"sessions": 2}


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


def test_two_senders_do_not_send_a_run_twice(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    """The command finds the lock of the running training."""
    run.steps(1, 2)
    end = start(run)
    wait_for(lambda: len(run.sent()) == 2)
    assert main(["track", str(run.folder), "--to", "toy"]) == 2
    assert "another process is sending" in capsys.readouterr().err
    end("finished")
    assert [step for step, _ in run.sent()] == [1, 2]


def test_a_missing_package_is_told_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after an hour of training, in a log that nobody reads."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="wandb"):
        require_trackers(["wandb"])
    require_trackers(["toy"])


def test_the_python_of_another_environment_is_withdrawn(capsys: pytest.CaptureFixture[str]) -> None:
    """The error says what replaces it; configs in which it was not set stay valid."""
    with pytest.raises(UserError, match="track_python") as raised:
        load_config(sets=["track_python=~/trackers/bin/python"], has_file=False)
    assert "tunewell track" in str(raised.value)
    load_config(sets=["track_python=null"], has_file=False)
    assert main(["track", "run", "--python", "python"]) == 2
    assert "--python" in capsys.readouterr().err


def test_report_to_is_an_alias() -> None:
    """The forms of other trainers: one name, a list, `none`."""
    for value, names in (("wandb", ("wandb",)), ("[mlflow, toy]", ("mlflow", "toy")), ("none", ()), ("[none]", ())):
        assert load_config(sets=[f"report_to={value}"], has_file=False).config.track == names
    with pytest.raises(UserError, match="tensorbord"):
        load_config(sets=["track=[tensorbord]"], has_file=False)


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
@pytest.mark.slow
def test_real_trackers_read_back_each_step_once(
    run: FakeRun, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run with a rewind, read with the tracker's own package: raw values, NaN, and the repeated steps."""
    if importlib.util.find_spec(TRACKERS.entry(name).module) is None:
        pytest.skip(f"{name} is not installed")
    store = os.environ.get("MLFLOW_TEST_URI") or f"file:{tmp_path}/mlflow"
    for variable, value in (
        ("WANDB_MODE", "offline"),
        ("MLFLOW_TRACKING_URI", store),
        ("MLFLOW_ALLOW_FILE_STORE", "true"),
        ("MLFLOW_EXPERIMENT_NAME", tmp_path.name),
    ):
        monkeypatch.setenv(variable, value)
    end = start(run, name)
    run.steps(1, 5)
    seen = run.folder / "track" / f"{name}.seen"
    wait_for(lambda: seen.is_file() and seen.stat().st_size == 8 * 5)
    run.rewind(2)
    run.steps(3, 6, salt=0.5)
    run.evaluated(6, 1.25)
    end("finished")
    place = store if name == "mlflow" else str(run.folder / "track" / name)
    reader = [sys.executable, str(FOLDER / "read_trackers.py"), name, place]
    done = subprocess.run(reader, capture_output=True, text=True)
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
