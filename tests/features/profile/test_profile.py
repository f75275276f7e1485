"""`tunewell profile`: real steps in a child, finished runs, and plain errors; nothing is left behind."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from corpora import tree, write_sums
from forked import run_command
from tunewell.cli.main import main
from tunewell.core import child
from tunewell.features.profile import workflow
from tunewell.features.profile.bottlenecks import covered_share, find_bottlenecks, time_by_part
from tunewell.features.profile.records import Profile

_SETS = (
    *("--set", "train.threads=1", "--set", "train.batch_tokens=256", "--set", "train.micro_batch_tokens=64"),
    *(
        "--set",
        "train.max_steps=40",
        "--set",
        "evaluate.every_steps=3",
        "--set",
        "evaluate.samples=1",
        "--set",
        "evaluate.sample_tokens=2",
    ),
    *("--set", "checkpoints.every_steps=3", "--set", "method.kind=full", "--set", "device=cpu"),
)


@pytest.fixture
def project(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with rows and a config for a model that starts from nothing."""
    write_sums(tmp_path, tiny_model, model="preset:tiny-1m", num_rows=60)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_the_child_measures_steps_and_their_parts_add_up(project: Path) -> None:
    done = run_command("profile", "--json", "--steps", "4", *_SETS, cwd=project)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)["profile"]
    profile = Profile.model_validate({name: told[name] for name in Profile.model_fields})
    assert (profile.num_measured, profile.num_steps, profile.source) == (4, 40, "steps")
    assert {"data", "forward", "backward", "optimizer", "log"} <= profile.phases.keys()
    assert not {"evaluate", "save", "processor"} & profile.phases.keys()
    assert sum(time_by_part(profile).values()) == pytest.approx(profile.total_seconds)
    covered = covered_share(profile)
    assert covered is not None and 0 < covered <= 1
    # One evaluation before the first step, then every third.
    assert profile.evaluation is not None and (profile.evaluation.number, profile.evaluation.every) == (15, 3)
    assert profile.checkpoint is not None and profile.checkpoint.number == 14
    assert profile.evaluation.number_measured >= 2 and profile.checkpoint.number_measured >= 2
    assert "train.micro_batch_tokens" in {trial.key for trial in profile.trials}
    assert profile.kernels is None and profile.compute_seconds
    assert profile.micro_batches and profile.micro_batches > 2
    assert "evaluation" in {found.name for found in find_bottlenecks(profile)}
    assert not (project / "run").exists()


def test_apply_runs_the_child_again_with_the_setting(
    project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The second child must get the setting last, and the scratch folders must be gone afterwards."""
    before = {"phases": {"forward": 0.02, "backward": 0.04, "other": 0.0}, "seconds": 0.06}
    slow = {"evaluation": {"seconds": 0.4, "number": 21, "every": 2, "number_measured": 3}}
    started: list[dict[str, Any]] = []

    def call(module: str, request: dict[str, Any], **_: Any) -> dict[str, Any]:
        started.append(request)
        folder = Path(request["folder"])
        assert folder.is_dir() and folder.parent == project
        return _profile(**before, **(slow if len(started) == 1 else {}))

    monkeypatch.setattr(workflow, "call", call)
    at_first = tree(project)
    assert main(["profile", "--steps", "5", "--apply", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["bottlenecks"][0]["key"] == "evaluate.every_steps"
    assert started[1]["config"]["evaluate"]["every_steps"] == told["bottlenecks"][0]["value"]
    assert told["applied"]["gain_measured"] == pytest.approx((0.06 + 0.4 * 21 / 40) / 0.06)
    assert tree(project) == at_first
    started.clear()
    assert main(["profile", "--steps", "5", "--apply"]) == 0
    words = " ".join(capfd.readouterr().out.split())
    assert "tried `evaluate.every_steps:" in words and "predicted" in words and "measured" in words


def _profile(**values: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "made_by": "test",
        "source": "steps",
        "model": "tiny",
        "method": "full",
        "device": "cpu",
        "is_gpu": False,
        "precision": "fp32",
        "threads": 1,
        "micro_batch_tokens": 64,
        "num_steps": 40,
        "num_measured": 5,
        "tokens": 256.0,
    }
    return usual | values


def _run_instead(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Start a shell in place of the child."""
    real = subprocess.Popen
    monkeypatch.setattr(child.subprocess, "Popen", lambda _, **options: real(["sh", "-c", script], **options))


@pytest.mark.parametrize(("code", "words"), [(-9, "killed by SIGKILL"), (-11, "killed by SIGSEGV")])
def test_a_child_that_is_killed_is_a_plain_error_and_leaves_nothing(
    project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], code: int, words: str
) -> None:
    _run_instead(monkeypatch, f"kill {code} $$")
    at_first = tree(project)
    assert main(["profile", "--steps", "5"]) == 2
    assert words in capfd.readouterr().err
    assert tree(project) == at_first


def test_a_child_that_fails_is_a_plain_error_with_its_last_line(
    project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _run_instead(monkeypatch, "echo 'ImportError: libcudart' >&2; exit 1")
    assert main(["profile", "--steps", "5"]) == 2
    assert "ImportError: libcudart" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "there is no run in this folder"),
        (["nowhere"], "`nowhere` is not a run"),
        (["--steps", "1"], "`--steps 1` is too few"),
        (["--padded-to", "64"], "no such option: --padded-to"),
        (["--steps", "5", "--data", "missing.jsonl"], "missing.jsonl"),
        (["--steps", "5", "--set", "train.steps=3"], "train.steps"),
    ],
)
def test_bad_input_is_a_plain_error(
    project: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["profile", *arguments]) == 2
    assert words in capfd.readouterr().err


def test_an_empty_folder_is_a_plain_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["profile", "--steps", "5"]) == 2
    assert "no training data" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_parent_imports_no_torch(project: Path) -> None:
    """Loading torch twice costs seconds, and its threads and memory would disturb the child."""
    check = """
        import subprocess, sys
        from tunewell.cli.main import main
        from tunewell.core import child
        real = subprocess.Popen
        subprocess.Popen = lambda _, **options: real(["sh", "-c", "exit 7"], **options)
        code = main(["profile", "--steps", "5"])
        print(code, "torch" in sys.modules)
    """
    command = [sys.executable, "-c", textwrap.dedent(check)]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False"]
