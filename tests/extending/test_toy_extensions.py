"""A toy of each extension point, added as `docs/extending.md` says and run end to end: one file, one registry line."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_source
from safetensors.torch import load_file
from toy_entries import DESCENT, NORMS

import tunewell
from corpora import row
from tunewell.cli import main as command_line
from tunewell.config.extensions import (
    FORMATS,
    METHODS,
    OPTIMIZERS,
    TRACKERS,
    FormatEntry,
    TrackerEntry,
)
from tunewell.core.registry import Entry, Registry
from tunewell.data.sources.base import SOURCES

SETTINGS = {
    "model": "preset:tiny-1m",
    "device": "cpu",
    "train": {"max_steps": 2, "batch_documents": 4},
    "evaluate": {"samples": 0},
    "verdict": {"after_training": False},
}


@pytest.fixture(autouse=True)
def toys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Find the toy modules by name, and leave every registry as it was."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.chdir(tmp_path)
    registries: list[Registry] = [FORMATS, METHODS, OPTIMIZERS, SOURCES, TRACKERS]
    before = [dict(registry._entries) for registry in registries]
    yield
    for registry, entries in zip(registries, before, strict=True):
        registry._entries = entries


def _settings(tokenizer: Path, **more: object) -> dict[str, object]:
    return SETTINGS | {"tokenizer": str(tokenizer)} | more


def test_a_toy_method_trains_saves_and_resumes(tiny_model: Path) -> None:
    """A method that needs changes outside its file is not an extension."""
    METHODS.add(NORMS)
    settings = _settings(tiny_model, method={"kind": "norms"}, checkpoints={"every_steps": 1})
    rows = [row(number) for number in range(30)]
    result = tunewell.train(settings, data=rows, out="run", progress=False)
    assert result.status == "finished"
    first, last = (load_file(path / "model.safetensors") for path in sorted(Path("run/checkpoints").glob("step-*"))[:2])
    assert first.keys() == last.keys()
    settings["train"] = {"max_steps": 3, "batch_documents": 4}
    more = tunewell.train(settings, data=rows, out="run", resume=True, allow_changes=["num_steps"], progress=False)
    assert more.steps == 3
    newest = load_file(max(Path("run/checkpoints").glob("step-*")) / "model.safetensors")
    moved = {name for name in newest if not torch.equal(newest[name], first[name])}
    assert moved and all("norm" in name for name in moved)


def test_a_toy_optimizer_trains_and_resumes(tiny_model: Path) -> None:
    """AdamW must not be assumed anywhere outside its file."""
    OPTIMIZERS.add(DESCENT)
    train = {"max_steps": 4, "batch_documents": 4, "optimizer": "descent", "learning_rate": 0.5, "warmup": 0}
    settings = _settings(tiny_model, method={"kind": "full"}, train=train)
    rows = [row(number) for number in range(30)]
    result = tunewell.train(settings, data=rows, out="run", progress=False)
    assert result.status == "finished" and result.losses[-1][1] < result.losses[0][1]
    settings["train"] = train | {"max_steps": 5}
    more = tunewell.train(settings, data=rows, out="run", resume=True, allow_changes=["num_steps"], progress=False)
    assert more.steps == 5
    state = load_file(max(Path("run/checkpoints").glob("step-*")) / "optimizer.safetensors")
    assert state["all/num_updates"] == 5, "the state went through the checkpoint"


@pytest.mark.slow
def test_a_toy_tracker_gets_a_run_and_a_hanging_one_costs_no_step(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tracker has a thread of its own: the run ends with all its steps while the tracker still hangs."""
    TRACKERS.add(TrackerEntry("toy", "a toy", "toy_tracker:ToyTracker"))
    rows = [row(number) for number in range(30)]
    monkeypatch.setenv("TOY_TRACKER", "hangs")
    result = tunewell.train(_settings(tiny_model, track=["toy"]), data=rows, out="hung", progress=False)
    assert (result.status, result.steps) == ("finished", 2)
    num_points = len(Path("hung/events.jsonl").read_text().splitlines())
    assert any("`tunewell track" in note and f"{num_points} points not sent" in note for note in result.notes)
    assert not Path("hung/track/toy.jsonl").exists(), "the tracker hangs, and nobody waited for it"
    monkeypatch.delenv("TOY_TRACKER")
    result = tunewell.train(_settings(tiny_model, report_to="toy"), data=rows, out="run", progress=False)
    assert not any("track" in note for note in result.notes)
    sent = [json.loads(line) for line in Path("run/track/toy.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in sent if "loss" in entry.get("values", {})] == [1, 2]
    assert sent[-1] == {"close": "finished"}


def _logged_steps() -> list[Any]:
    lines = map(json.loads, Path("run/events.jsonl").read_text().splitlines())
    return [(line["step"], line["seconds"]) for line in lines if line["kind"] == "step"]


def _sent_steps() -> list[Any]:
    """Return the steps that the toy got, with their seconds, and the status after each session."""
    lines = map(json.loads, Path("run/track/toy.jsonl").read_text().splitlines())
    steps = [line.get("close") or (line["step"], line["values"].get("seconds")) for line in lines if "open" not in line]
    return [step for step in steps if step[1]]


@pytest.mark.slow
def test_a_killed_run_is_sent_by_the_command_and_its_resume_continues_the_record(tiny_model: Path) -> None:
    """`kill -9` ends the thread of the tracker too. What was not sent is sent once, by whoever comes first."""
    (rows := Path("rows.jsonl")).write_text("".join(json.dumps(row(number)) + "\n" for number in range(30)))
    folders = [str(Path(__file__).parent), str(Path(tunewell.__file__).parents[1])]
    training = f"""
import os, sys
sys.path[:0] = {folders}
import tunewell
from tunewell.config.extensions import TRACKERS, TrackerEntry
TRACKERS.add(TrackerEntry("toy", "a toy", "toy_tracker:ToyTracker"))
is_resuming = "--resume" in sys.argv
settings = {_settings(tiny_model, track=["toy"], train={"max_steps": 200, "batch_documents": 1})}
tunewell.train(settings, data={str(rows)!r}, out="run", progress=False, resume=is_resuming)
"""
    command, environment = [sys.executable, "-c", training], {**os.environ, "TOY_KILLS": "5"}
    killed = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    TRACKERS.add(TrackerEntry("toy", "a toy", "toy_tracker:ToyTracker"))
    assert command_line.main(["track", "run", "--to", "toy"]) == 0
    assert _sent_steps()[-1] == "killed"
    assert _sent_steps()[:-1] == _logged_steps()
    assert subprocess.run([*command, "--resume"]).returncode == 0
    assert _sent_steps()[-1] == "finished"
    assert len(_sent_steps()) == len({*_sent_steps()}) and {*_logged_steps()} < {*_sent_steps()}
    assert json.loads(Path("run/track/toy.json").read_text())["state"] == {"sessions": 3}


def test_a_toy_source_is_prepared(tiny_model: Path) -> None:
    """Storage that is not a folder must not need changes in the readers."""
    SOURCES.add(Entry("memory", "Rows of this process.", "toy_source:MemoryFile"))
    lines = "".join(json.dumps(row(number)) + "\n" for number in range(25))
    toy_source.FILES["rows.jsonl"] = lines.encode()
    made = tunewell.prepare(_settings(tiny_model), data="memory://rows.jsonl", progress=False)
    assert made.manifest.rows_in == 25
    assert tunewell.open_corpus("corpus")[0].source == "rows.jsonl"


def test_toy_formats_are_detected_and_can_be_named(tiny_model: Path, tmp_path: Path) -> None:
    """Guards a row format and a file format: one line each."""
    FORMATS.add(FormatEntry("riddle", "a toy", "toy_format:convert_riddle", columns=("riddle", "unriddled")))
    FORMATS.add(FormatEntry("quiz", "a toy", "toy_format:read_quiz", files=("txt",), head=r"\AQUIZ\n"))
    rows = [{"riddle": f"what is {number}?", "unriddled": "a number", "author": "me"} for number in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in rows), encoding="utf-8")
    (tmp_path / "quiz.txt").write_text("QUIZ\n" + "".join(f"q {n}?\na {n}\n" for n in range(20)), encoding="utf-8")
    manifest = tunewell.prepare(model=str(tiny_model), data=["rows.jsonl", "quiz.txt"]).manifest
    assert [source.formats for source in manifest.sources] == [{"riddle": 20}, {"quiz": 20}]
    assert manifest.sources[0].unused == {"author": 20}
    named = tunewell.prepare(model=str(tiny_model), data="rows.jsonl", sets=["data.sources[0].format=riddle"])
    assert named.manifest.sources[0].formats == manifest.sources[0].formats


def test_a_toy_command_runs_and_is_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One line in `COMMANDS` and one file."""
    monkeypatch.setattr(command_line, "COMMANDS", (*command_line.COMMANDS, ("hello", "toy_command")))
    assert command_line.main(["hello", "Ada"]) == 0
    assert command_line.main(["--help", "--all"]) == 0
    printed = capsys.readouterr().out
    assert "hello Ada" in printed and "Print a greeting." in printed
