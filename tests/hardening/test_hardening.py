"""The scripts behind `make attacks`, `make fuzz` and `make soak` work; the targets themselves run for minutes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def script(name: str, *arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    """Run a script of this folder in a process of its own."""
    path = os.pathsep.join([str(HERE.parents[1] / "src"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, str(HERE / name), *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.slow
def test_a_soak_of_two_runs_ends_as_the_undisturbed_run(tmp_path: Path) -> None:
    done = script("soak.py", "--lives", "2", "--seed", "3", "--out", "soak", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lives = [json.loads(line) for line in (tmp_path / "soak" / "soak.jsonl").read_text().splitlines()]
    assert len(lives) == 2 and all(life["faults"] for life in lives)
    assert "equal to the bit" in (tmp_path / "soak" / "soak.svg").read_text()


def test_every_attack_says_what_it_expects():
    """A line without an exit code would hold whatever happens."""
    cases = [json.loads(line) for line in (HERE / "attacks.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len({case["id"] for case in cases}) == len(cases)
    assert all(case["exit"] and case["attack"] and case["from"] in ("table", "new") for case in cases)
    assert sum(case["from"] == "table" for case in cases) >= 180
    assert sum(case["from"] == "new" for case in cases) >= 40


@pytest.mark.slow
def test_attacks_are_run_and_judged(tmp_path: Path) -> None:
    done = script("attacks.py", "--only", "gguf", cwd=tmp_path)
    assert done.returncode == 0 and "all held" in done.stdout, done.stdout + done.stderr
