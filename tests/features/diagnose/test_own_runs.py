"""A run folder of tunewell is judged by its steps and its problems, not by the words of its plan."""

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from sample_reports import college_report, looping_report

from tunewell.core.errors import UserError
from tunewell.features.diagnose.diagnose import diagnose_paths
from tunewell.features.diagnose.workflow import diagnose
from tunewell.records.report import write_report
from tunewell.records.rundir import CRASH, RunDir

PLAN = {
    "device": {"value": "cpu", "because": "no GPU was found: AMD EPYC, 23.5 GiB"},
    "learning_rate": {"value": 1e-3, "because": "the loss diverged at a higher learning rate"},
}


def write_run(folder: Path, *entries: dict[str, Any], status: str | None = "stopped", num_steps: int = 20) -> Path:
    folder.mkdir(exist_ok=True)
    steps = [
        {"kind": "step", "step": n, "loss": 2 - n / 50, "grad_norm": 0.5, "seconds": 1.0} for n in range(1, num_steps)
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    (folder / "healing.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    (folder / "plan.json").write_text(json.dumps(PLAN, indent=2))
    (folder / "config.yaml").write_text("train:\n  learning_rate: 0.5\n")
    if status is not None:
        outcome = {"status": status, "reason": "it ended", "advice": ["set `train.recompute: on`"]}
        (folder / "outcome.json").write_text(json.dumps(outcome))
    return folder


def entry(name: str, action: str, *, severity: str = "fault") -> dict[str, Any]:
    return {"step": 6, "name": name, "severity": severity, "action": action, "words": f"{name} happened"}


def names(folder: Path) -> list[str]:
    return [finding.id for finding in diagnose_paths([folder]).findings] or ["healthy"]


def test_words_of_the_plan_are_not_messages(tmp_path: Path) -> None:
    """The plan of a run on a CPU says that no GPU was found, which is no failure."""
    assert names(write_run(tmp_path, status="finished")) == ["healthy"]


def test_a_problem_that_the_run_solved_is_a_note(tmp_path: Path) -> None:
    found = diagnose_paths([write_run(tmp_path, entry("nan-gradients", "rewind"), status="finished")])
    assert found.status == "healthy" and "step 6: nan-gradients happened" in found.notes


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nan-gradients", "nan-gradients"),
        ("out-of-memory", "oom-host-ram"),
        ("killed", "oom-host-ram"),
        ("crashed", "unknown"),
    ],
)
def test_the_problem_that_stopped_a_run_is_named(tmp_path: Path, name: str, expected: str) -> None:
    found = diagnose_paths([write_run(tmp_path, entry("loss-spike", "skip"), entry(name, "stop"))])
    assert found.findings[0].id == expected and found.tool == "tunewell"
    shown = found.findings[0].evidence[0]
    assert (shown.file, shown.line) == ("healing.jsonl", 2)
    assert "advice of the run: set `train.recompute: on`" in found.notes
    assert found.num_steps == 19


def test_a_series_names_the_line_of_its_step(tmp_path: Path) -> None:
    write_run(tmp_path, status=None)
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    broken = [json.dumps({"kind": "step", "step": n, "loss": "nan", "grad_norm": "nan"}) for n in range(20, 24)]
    (tmp_path / "events.jsonl").write_text("\n".join([*lines, *broken, '{"kind": "st']))
    [finding, *_] = diagnose_paths([tmp_path]).findings
    assert finding.id == "nan-gradients" and finding.evidence[0].line == 20 and finding.evidence[0].note


def test_the_traceback_of_a_crash_is_in_the_run_folder_until_a_success(tmp_path: Path) -> None:
    """The traceback explains the run better than its exit code."""
    folder = tmp_path / "run"

    def end(error: Exception | None) -> None:
        with RunDir.reopen(folder) if folder.exists() else RunDir.begin(folder):
            write_run(folder, entry("crashed", "stop"), status=None)
            if error is not None:
                raise error

    with pytest.raises(ValueError):
        end(ValueError("Attempting to unscale FP16 gradients."))
    found = diagnose_paths([folder]).findings
    assert found[0].id == "fp16-unscale-gradients" and found[0].evidence[0].file == CRASH
    with pytest.raises(UserError):
        end(UserError("not a crash"))
    assert (folder / CRASH).is_file()
    end(None)
    assert not (folder / CRASH).exists()


def test_the_newest_of_several_runs_is_read(tmp_path: Path) -> None:
    old = write_run(tmp_path / "old", entry("nan-gradients", "stop"))
    os.utime(old / "events.jsonl", (1, 1))
    write_run(tmp_path / "new", status="finished")
    found = diagnose_paths([tmp_path])
    assert found.status == "healthy" and "2 runs; the newest, `new`" in found.notes[0]


def test_a_damaged_run_is_an_error_that_says_so(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "events.jsonl").write_text('{"kind": "step"}\n{"kind": "step", "step": 1, "loss": 2}\n')
    with pytest.raises(UserError, match="damaged"):
        diagnose_paths([tmp_path])


def test_the_verdict_of_a_run_that_did_not_pass_is_named(tmp_path: Path) -> None:
    """The log of a run whose answers repeat themselves has no failure in it."""
    run = write_run(tmp_path / "run", status="finished")
    write_report(run, looping_report())
    [note] = [note for note in diagnose([str(run)], io.BytesIO()).notes if "verdict" in note]
    assert "is FAIL: " in note and looping_report().next in note
    write_report(run, college_report())
    assert not [note for note in diagnose([str(run)], io.BytesIO()).notes if "verdict" in note]
