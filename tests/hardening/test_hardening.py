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
