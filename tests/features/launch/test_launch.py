"""The job file of a cluster: what it has, what is refused, and that a shell can read it."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tunewell.cli.main import main

CONFIG = """\
model: preset:tiny-1m
data:
  sources:
    - path: rows.jsonl
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a config and its rows, on a machine without Slurm."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    (tmp_path / "rows.jsonl").write_text('{"question": "What is it?", "answer": "A row."}\n' * 3)
    (tmp_path / "tunewell.yaml").write_text(CONFIG)
    return tmp_path


def launch(*words: str) -> int:
    return main(["launch", "slurm", *words])


def test_a_shell_reads_the_file_and_no_placeholder_is_left(project: Path) -> None:
    """A brace or a quote in a template breaks the job hours after it was submitted."""
    assert launch("--nodes", "2", "--gpus", "4", "--partition", "gpu", "--memory", "200G") == 0
    text = (project / "train.sbatch").read_text()
    assert "{{" not in text
    subprocess.run(["bash", "-n", "train.sbatch"], check=True)
    directives = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", text, re.MULTILINE))
    assert directives | {"signal": ""} == {
        "job-name": "run",
        "nodes": "2",
        "ntasks-per-node": "4",
        "gpus-per-node": "4",
        "cpus-per-task": "8",
        "mem": "200G",
        "time": "24:00:00",
        "partition": "gpu",
        "signal": "",
        "output": "slurm-%j.log",
        "open-mode": "append",
    }
    assert "tunewell train --resume-or-start --config tunewell.yaml'" in text
    assert text.index("#SBATCH --open-mode") < text.index("PYTHON=")  # Slurm ignores directives after a command


def test_the_screen_names_processes_and_the_next_command(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With many processes and a small step, most of them are idle, and nobody says so."""
    assert launch("--nodes", "2", "--gpus", "4") == 0
    screen = capsys.readouterr().out
    assert "8 processes" in screen and "some are idle" in screen and screen.endswith("next: sbatch train.sbatch\n")
    assert launch("--json", "--force", "--nodes", "2") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ranks"], found["is_checked"], found["format_version"]) == (2, False, 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes", "0"], "--nodes"),
        (["--gpus", "-1"], "--gpus"),
        (["--time", "tomorrow"], "`HH:MM:SS`"),
        (["--time", "1:00\n#SBATCH --uid=0"], "`HH:MM:SS`"),
        (["--partition", "gpu; rm -rf ."], "is not a name"),
        (["--account", "a\n#SBATCH --wrap=id"], "is not a name"),
        (["--memory", "much memory"], "is not a name"),
        (["--config", "none.yaml"], "none.yaml"),
        (["--out", "elsewhere/train.sbatch"], "folder of the config"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_written(
    project: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    """A value with a line break would add a directive to the job; others are refused by Slurm hours later."""
    (project / "elsewhere").mkdir()
    assert launch(*words) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not list(project.glob("**/*.sbatch"))


@pytest.mark.parametrize(
    ("changed", "message"),
    [("path: rows.jsonl", "rows.jsonl"), ("model: preset:tiny-1m", "model"), ("data:\n  sources:", "no training data")],
)
def test_a_job_that_could_not_train_is_not_written(
    project: Path, capsys: pytest.CaptureFixture[str], changed: str, message: str
) -> None:
    """A missing file would be found after hours in a queue."""
    if changed.startswith("path"):
        (project / "rows.jsonl").unlink()
    elif changed.startswith("model"):
        (project / "tunewell.yaml").write_text(CONFIG.replace(changed, "model: no/such/folder"))
    else:
        (project / "tunewell.yaml").write_text("model: preset:tiny-1m\n")
    assert launch() == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_an_existing_file_is_kept(project: Path) -> None:
    """The file is edited by hand: modules, networks, mail."""
    (project / "train.sbatch").write_text("mine")
    assert launch() == 2
    assert (project / "train.sbatch").read_text() == "mine"


def test_what_slurm_refuses_is_an_error(project: Path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`sbatch --test-only` knows the limits of the cluster; its message must reach the user."""
    from tunewell.features.launch import workflow

    code = "import sys; sys.stderr.write('sbatch: error: invalid partition specified: gpu\\n'); sys.exit(1)"
    monkeypatch.setattr(shutil, "which", lambda name: "sbatch")
    monkeypatch.setattr(workflow, "run", lambda words, seconds: real_run([sys.executable, "-c", code], seconds=seconds))
    from tunewell.core.child import run as real_run

    assert launch("--partition", "gpu") == 2
    assert "invalid partition specified: gpu" in capsys.readouterr().err
