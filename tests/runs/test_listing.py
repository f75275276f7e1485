"""The list of runs: what it shows of finished, running, killed and damaged ones."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tunewell.cli.main import main
from tunewell.core.errors import UserError
from tunewell.core.progress import Progress
from tunewell.runs.heartbeat import Pulse
from tunewell.runs.state import StoredRun, find_runs, list_runs
from tunewell.runs.status import RunStatus, dump_stacks


def a_run(folder: Path, *, steps: int = 4, held_out: Any = 1.5, status: str | None = "finished", **plan: Any) -> Path:
    folder.mkdir(parents=True)
    chosen = {"num_steps": {"value": 10, "because": ""}, "method": {"value": "lora", "because": ""}}
    sources = {"data": {"sources": [{"path": "some/rows.jsonl"}]}}
    (folder / "plan.json").write_text(json.dumps({"model": "a/model", "config": sources, **chosen, **plan}))
    lines: list[dict[str, Any]] = [{"kind": "held_out", "step": 0, "loss": 2.5}]
    lines += [
        {"kind": "step", "step": step, "loss": 3.0 - step / 10, "tokens": 100, "seconds": 0.5, "micro_batches": 2}
        for step in range(1, steps + 1)
    ]
    lines.append({"kind": "held_out", "step": steps, "loss": held_out})
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / ".lock").touch()
    if status is not None:
        outcome = {"status": status, "reason": "because", "steps": steps, "last_loss": 2.6}
        (folder / "outcome.json").write_text(json.dumps(outcome | {"held_out": {"best": held_out}}))
    return folder


def lock(run: Path, pid: int, host: str | None = None) -> None:
    owner = {"pid": pid, "host": host or socket.gethostname(), "since": "2026-01-01 10:00:00"}
    (run / ".lock").write_text(json.dumps(owner) + "\n")


def ended_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_finished_run_is_summarised_from_its_files(tmp_path: Path) -> None:
    """Guards against a table that shows another number than the run's own files."""
    run = a_run(tmp_path / "run")
    (run / "report.json").write_text(json.dumps({"exchanges": [], "verdict": "PASS"}, indent=2))
    found = StoredRun(run)
    assert (found.status, found.verdict, found.held_out, found.loss) == ("finished", "PASS", 1.5, 2.6)
    assert (found.steps, found.planned_steps, found.tokens_per_second) == (4, 10, 200.0)
    assert (found.model, found.method, found.data) == ("a/model", "lora", "rows.jsonl")


def test_a_verdict_in_an_answer_is_not_the_verdict(tmp_path: Path) -> None:
    """The end of a report is searched by pattern; answers in it may contain anything."""
    run = a_run(tmp_path / "run")
    answers = [{"text": '\n  "verdict": "PASS"'}] * 3
    (run / "report.json").write_text(json.dumps({"exchanges": answers, "verdict": "FAIL"}, indent=2, sort_keys=True))
    assert StoredRun(run).verdict == "FAIL"
    (run / "report.json").write_text(json.dumps({"verdict": "WEAK"}))  # as another program writes it
    assert StoredRun(run).verdict == "WEAK"


def test_running_killed_and_resumed_runs_are_told_apart(tmp_path: Path) -> None:
    """A run that was killed has a lock with an owner; one that runs has a living owner; a resume keeps the outcome."""
    running, killed, resumed = (a_run(tmp_path / name, status=None) for name in ("running", "killed", "resumed"))
    lock(running, os.getpid())
    lock(killed, ended_pid())
    (resumed / "outcome.json").write_text(json.dumps({"status": "interrupted", "steps": 2, "held_out": {"best": 2.0}}))
    lock(resumed, os.getpid())
    assert StoredRun(running).status == "running"
    assert StoredRun(killed).status == "killed"
    now = StoredRun(resumed)
    assert (now.status, now.steps, now.held_out) == ("running", 4, 1.5), "an old outcome was shown"
    lock(resumed, 1, host="elsewhere")
    assert "elsewhere" in RunStatus(resumed).state


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"model": 3, "num_steps": 7, "config": []}', "\0\0"])
@pytest.mark.parametrize("name", ["plan.json", "outcome.json", "report.json", "events.jsonl", ".lock"])
def test_a_damaged_run_is_listed_without_an_error(tmp_path: Path, name: str, text: str) -> None:
    """One broken file among a thousand runs must not hide the others."""
    run = a_run(tmp_path / "run")
    (run / name).write_text(text)
    assert [found.run for found in list_runs(tmp_path)] == [str(run)]
    assert main(["runs", str(tmp_path)]) == 0
    assert main(["runs", str(run), "--json"]) == 0


def test_runs_are_filtered_and_sorted(tmp_path: Path) -> None:
    """Unknown losses come last in either order, NaN too."""
    for name, loss in (("low", 1.0), ("high", 3.0), ("nan", "nan"), ("none", None)):
        a_run(tmp_path / "deep" / name, held_out=loss, model=f"model-{name}")
    names = [Path(run.run).name for run in list_runs(tmp_path, sort="held_out")]
    assert names == ["low", "high", "nan", "none"]
    names = [Path(run.run).name for run in list_runs(tmp_path, sort="held_out", is_reversed=True)]
    assert names == ["high", "low", "nan", "none"]
    assert [Path(run.run).name for run in list_runs(tmp_path, filters=["model=MODEL-H", "status=fin"])] == ["high"]
    for filters, sort in ((["modle=x"], "when"), (["model"], "when"), ([], "losses")):
        with pytest.raises(UserError):
            list_runs(tmp_path, filters=filters, sort=sort)


def test_checkpoints_and_hidden_folders_are_not_searched(tmp_path: Path) -> None:
    """A checkpoint of a run is not a run, and a virtual environment has thousands of folders."""
    a_run(tmp_path / "a")
    a_run(tmp_path / "a" / "inside")
    a_run(tmp_path / ".hidden" / "b")
    a_run(tmp_path / "checkpoints" / "c")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert [run.name for run in find_runs(tmp_path)] == ["a"]


def test_a_plan_written_to_the_project_folder_does_not_hide_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`tunewell plan --json > plan.json` made the folder a run that was "killed", and hid the others."""
    a_run(tmp_path / "run")
    (tmp_path / "plan.json").write_text('{"format_version": 1, "fits": true}')
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == 0
    shown = capsys.readouterr().out
    assert "killed" not in shown and "1 run" in shown


def test_the_table_fits_sixty_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Columns that do not fit are left out and named."""
    a_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["runs"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 60
    assert "not shown here" in shown and "1.5000" in shown
    assert main(["runs", "--columns", "run,data,note"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["run", "rows.jsonl", "because"]


def test_the_status_of_a_silent_run_tells_computing_from_waiting(tmp_path: Path) -> None:
    """ "Is it stuck?": a process that computes is slow, one that uses no CPU time may hang."""
    run = a_run(tmp_path / "run", status=None)
    os.utime(run / "events.jsonl", (1_000_000, 1_000_000))
    (run / ".pulse").write_text(json.dumps({"stage": "", "step": 4, "passes": 1}))
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    idle = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        lock(run, busy.pid)
        status = RunStatus(run)
        assert status.state.startswith("computing, but"), status.state
        assert status.stage == "step 5, forward pass 1 of about 2"
        assert status.cpu_seconds is not None and status.cpu_share is not None
        while Path(f"/proc/{idle.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
            pass
        lock(run, idle.pid)
        assert "may hang" in RunStatus(run).state
        with pytest.raises(UserError, match="stacks"):
            dump_stacks(idle.pid)  # no supervisor; a signal would have ended it
        assert idle.poll() is None
    finally:
        for process in (busy, idle):
            process.kill()
            process.wait()
    with pytest.raises(UserError, match="no running process"):
        RunStatus(run, with_stacks=True)


def test_a_run_writes_its_activity(tmp_path: Path) -> None:
    """`.pulse` is the only sign of a run inside a long step; a stage and its forward passes must be in it."""
    pulse = Pulse()
    pulse.beat()  # before the folder exists
    pulse.open(tmp_path)
    pulse._written_at = 0.0
    pulse(Progress("loading the model"))
    assert json.loads((tmp_path / ".pulse").read_text())["stage"] == "loading the model"
    pulse._written_at = 0.0
    pulse.beat()
    activity = json.loads((tmp_path / ".pulse").read_text())
    assert (activity["passes"], activity["pid"]) == (1, os.getpid())


def test_the_command_imports_no_torch(tmp_path: Path) -> None:
    """A list of runs must appear at once."""
    a_run(tmp_path / "run")
    code = (
        f"import sys; from tunewell.cli.main import main; main(['runs', {str(tmp_path)!r}]); "
        "heavy = {'torch', 'transformers', 'pyarrow', 'rich'} & set(sys.modules); sys.exit(', '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_printed_plan_hides_no_runs(tmp_path):
    """`tunewell plan --json > plan.json` made the project folder one run, and its real runs vanished."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "plan.json").write_text("{}")
    (run / "config.yaml").write_text("")
    (tmp_path / "plan.json").write_text("{}")
    assert list(find_runs(tmp_path)) == [run]
