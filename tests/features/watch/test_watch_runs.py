"""Real runs on the page: its numbers are those of the records, and it changes nothing about a run."""

import hashlib
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from watching import Client, watching

from corpora import write_rows

pytestmark = pytest.mark.slow

_STEPS = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A folder with a model of some 80,000 parameters that the page can train."""
    folder = tmp_path_factory.mktemp("model") / "small"
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**shape, vocab_size=512, max_position_embeddings=512)).save_pretrained(folder)
    for file in tiny_model.iterdir():
        if not (folder / file.name).exists():
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture
def project(tmp_path: Path, model: Path) -> Path:
    """A folder with rows, a model, and a config of a run without a verdict."""
    write_rows(
        tmp_path / "rows.jsonl",
        [{"instruction": f"What is {n} plus {n}?", "output": f"It is {2 * n}."} for n in range(60)],
    )
    (tmp_path / "model").symlink_to(model)
    settings = {
        "model": str(model),
        "data": {"sources": "rows.jsonl", "held_out": 0.2},
        "train": {"max_steps": _STEPS, "batch_documents": 4, "threads": 1, "learning_rate": 5e-3},
        "evaluate": {"every_steps": 6, "samples": 2},
        "checkpoints": {"every_steps": 4},
        "verdict": {"after_training": False},
    }
    (tmp_path / "first.yaml").write_text(json.dumps(settings))
    return tmp_path


def train(project: Path, run: str, *words: str, faults: str = "") -> int:
    """Train with the command line, and return the exit code."""
    command = [sys.executable, "-m", "tunewell", "train", "--config", "first.yaml", "--out", run, *words]
    planted = {"TUNEWELL_FAULTS": faults} if faults else {}
    more = ["--enable-fault-injection"] if faults else []
    with (project / f"{run}.log").open("w") as log:
        return subprocess.run(
            [*command, *more], cwd=project, stdout=log, stderr=log, check=False, env=os.environ | planted
        ).returncode


class Follower(threading.Thread):
    """Follows a run like a tab: after a reset it reads the curve again."""

    def __init__(self, page: Client, run: str) -> None:
        super().__init__(daemon=True)
        self.page, self.run_name = page, run
        self.steps: list[tuple[int, Any]] = []
        self.num_resets = 0
        self.is_over = False

    def run(self) -> None:
        while not self.is_over:
            with suppress(AssertionError, OSError):
                curve = self.page.get("curve", id=self.run_name)
                self.steps = list(zip(curve["columns"]["step"], curve["columns"]["loss"], strict=True))
                with self.page.stream(run=self.run_name, after=curve["cursor"]) as stream:
                    for kind, data in stream.events():
                        if kind == "steps":
                            self.steps += [(row["step"], row["loss"]) for row in data["rows"]]
                        self.num_resets += kind == "reset"
            time.sleep(0.05)


@contextmanager
def followed(page: Client, run: str) -> Iterator[Follower]:
    follower = Follower(page, run)
    follower.start()
    yield follower
    time.sleep(1.0)
    follower.is_over = True


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def wait_for(condition: Callable[[], Any], seconds: float = 240) -> Any:
    """Return what a condition returns, once it is true."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if found := condition():
            return found
        time.sleep(0.1)
    raise AssertionError("it did not happen in time")


def require_truth(page: Client, project: Path, run: str, follower: Follower) -> None:
    """Every number of the page is that of its record."""
    folder = project / run
    events = lines(folder / "events.jsonl")
    steps = [event for event in events if event["kind"] == "step"]
    curve = page.get("curve", id=run, points=10_000)
    for name, values in curve["columns"].items():
        if name != "tokens_per_second":
            assert values == [event[name] for event in steps], name
    assert curve["columns"]["tokens_per_second"] == [event["tokens"] / event["seconds"] for event in steps]
    assert curve["held_out"] == [event for event in events if event["kind"] == "held_out"]
    assert curve["healing"] == lines(folder / "healing.jsonl")
    assert follower.steps == [(event["step"], event["loss"]) for event in steps], "a step is missing or doubled"
    shown = page.get("samples", id=run)["rows"]
    key = ("step", "document", "answer", "reference", "right", "fault")
    known = [[row[name] for name in key] for row in lines(folder / "samples.jsonl")]
    assert sorted([answer[name] for name in key] for answer in shown) == sorted(known)
    found = page.get("run", id=run)
    if (folder / "outcome.json").is_file():
        outcome = json.loads((folder / "outcome.json").read_text())
        assert (found["loss"], found["steps"]) == (outcome["last_loss"], outcome["steps"])
        assert found["held_out"] == outcome["held_out"]["best"]
    else:
        assert (found["loss"], found["steps"]) == (steps[-1]["loss"], steps[-1]["step"])
    plan = json.loads((folder / "plan.json").read_text())
    assert {own["key"]: own["value"] for own in found["plan"]} == {
        name: value["value"]
        for name, value in plan.items()
        if isinstance(value, dict) and "because" in value and len(value) == 2
    }


@pytest.mark.parametrize(
    ("faults", "status", "num_resets"),
    [
        ("", "finished", 0),
        ("nan@gradients:step=9", "finished", 0),
        ("nan@gradients:step=9,times=3", "finished", 1),
        ("kill@step:step=11", "killed", 0),
    ],
    ids=["healthy", "NaN healed", "rewound", "killed"],
)
def test_the_numbers_of_a_run_are_those_of_its_records(project, faults, status, num_resets):
    """Guards against values of the form shown as those of the run, and against steps that a rewind has undone."""
    with watching(project) as page, followed(page, "run") as follower:
        train(project, "run", *(["--no-supervisor"] if status == "killed" else []), faults=faults)
        wait_for(lambda: page.get("run", id="run")["status"] == status)
        time.sleep(1.5)
        require_truth(page, project, "run", follower)
        assert bool(follower.num_resets) == bool(num_resets)
        if "nan" in faults:
            assert page.get("curve", id="run")["healing"]


def test_a_run_that_is_stopped_and_resumed_on_the_page(project):
    """Guards against a stop that loses steps, and a resume with other settings or from another folder."""
    (project / "first.yaml").write_text((project / "first.yaml").read_text().replace(str(_STEPS), "400", 1))
    words = [sys.executable, "-m", "tunewell", "train", "--config", "first.yaml", "--out", "run"]
    with watching(project) as page, followed(page, "run") as follower, (project / "log").open("w") as log:
        process = subprocess.Popen(words, cwd=project, stdout=log, stderr=log)
        wait_for(lambda: len(follower.steps) > 10)
        held = page.error("POST", "act", {"id": "run", "action": "resume"})[1]
        assert "still running" in held["what"]
        assert "asked to stop" in page.post("act", id="run", action="stop")["message"]
        assert "before" in page.post("act", id="run", action="stop")["message"]
        assert process.wait(timeout=120) == 143
        stopped = page.get("run", id="run")
        assert stopped["status"] == "interrupted"
        number = stopped["steps"]
        (project / "first.yaml").unlink()  # a resume needs nothing but the run
        started = page.post("act", id="run", action="resume")
        assert started["command"] == "tunewell train --resume --out run"
        busy = page.error("POST", "act", {"id": "run", "action": "resume"})
        assert busy[0] in (400, 409)
        assert "run" in busy[1]["what"]
        wait_for(lambda: page.get("run", id="run")["steps"] > number + 5)
        page.post("act", id="run", action="stop")
        wait_for(lambda: page.get("job", id=started["job"]["id"])["status"] == "stopped")
        time.sleep(1.5)
        require_truth(page, project, "run", follower)


def weights(run: Path) -> dict[str, str]:
    """Return the hashes of the last checkpoint's weights."""
    last = max((run / "checkpoints").iterdir())
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in last.glob("*.safetensors")}


@contextmanager
def server(project: Path) -> Iterator[tuple[subprocess.Popen[str], Client]]:
    """Start `tunewell watch` as a process."""
    words = [sys.executable, "-m", "tunewell", "watch", str(project), "--port", "0", "--json", "--no-open"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url, _, token = json.loads(process.stdout.readline())["url"].partition("#token=")
        try:
            yield process, Client(url.rstrip("/"), project, token)
        finally:
            process.kill()


def test_closing_the_page_and_killing_the_server_change_no_run(project):
    """Guards against runs that stall or end with the page: the pipe of another tool was drained by its tab alone."""
    rows = (project / "rows.jsonl").read_bytes()
    body = {"answers": [], "model": "model", "method": "lora", "settings": {"train.max_steps": 60}}
    with server(project) as (_, page):
        data = page.upload("rows.jsonl", rows)["data"]
        kind, started = page.work("new/start", data=data, name="watched", **body)
        assert kind == "result", started
        again = page.work("new/start", data=data, name="second", **body)
        assert (again[0], again[1]["error"]["code"]) == ("error", "busy")
        assert "watched/run" in again[1]["error"]["what"]
        wait_for(lambda: page.get("run", id="watched/run")["steps"])
        curve = page.get("curve", id="watched/run")
        with page.stream(run="watched/run", after=curve["cursor"]) as stream:
            steps = [row["step"] for row in stream.until("steps")["rows"]]
            seen = stream.last_id
    with server(project) as (_, page):  # the first was killed with -9
        wait_for(lambda: page.get("run", id="watched/run")["status"] == "finished")
        wait_for(lambda: page.get("job", id=started["job"]["id"])["status"] == "done")
        with page.stream(last_id=seen, run="watched/run") as stream:
            steps += [row["step"] for row in stream.until("steps")["rows"]]
        known = [*curve["columns"]["step"], *steps]
        assert known == list(range(1, 61)), "after reconnecting, a step is missing or doubled"
        assert page.get("report", id="watched/run")["verdict"]
    for command in started["commands"]:
        words = command.replace("watched", "unwatched").split()[1:]
        done = subprocess.run(
            [sys.executable, "-m", "tunewell", *words], cwd=project, capture_output=True, text=True, check=False
        )
        assert done.returncode in (0, 3, 4), done.stderr
    assert weights(project / "watched" / "run") == weights(project / "unwatched" / "run")
    one, other = ((project / name / "tunewell.yaml").read_bytes() for name in ("watched", "unwatched"))
    assert one == other


def test_a_job_that_fails_tells_why(project):
    """Guards against a start that seems to work, and against a page that waits for ever."""
    with watching(project) as page:
        broken = project / "broken"
        broken.mkdir()
        (broken / "config.json").write_text("{}")
        kind, data = page.work("new/draft", data="rows.jsonl", model="broken", name="x", answers=[])
        assert kind == "error"
        assert data["error"]["what"]


def test_ten_shown_commands_do_what_the_buttons_did(project):
    """Guards against a command on the screen that does not work as pasted, or does something else."""
    replayed: list[str] = []

    def replay(command: str, *, codes: tuple[int, ...] = (0, 3, 4)) -> Any:
        """Run a shown command in the folder, and return its JSON."""
        words = [sys.executable, "-m", "tunewell", *shlex.split(command)[1:]]
        done = subprocess.run(words, cwd=project, capture_output=True, text=True, check=False)
        assert done.returncode in codes, done.stderr
        replayed.append(command.split()[1])
        return json.loads(done.stdout) if "--json" in command else done.stdout

    request = {"data": "rows.jsonl", "answers": []}
    with watching(project) as page:
        found = page.work("new/models", **request)[1]
        assert replay(f"{found['command']} --json")["recommended"] == (found["recommended"] or {}).get("name")
        body = request | {"model": "model", "name": "one", "settings": {"train.max_steps": 16}}
        shown = page.work("new/draft", **body)[1]
        kind, started = page.work("new/start", **body)
        assert kind == "result", started
        assert (project / "one" / "tunewell.yaml").read_text() == shown["config"]["text"]
        wait_for(lambda: page.get("run", id="one/run")["steps"])
        for command in started["commands"][:1]:
            replay(command.replace("one/", "two/"))
        assert (project / "two" / "tunewell.yaml").read_text() == shown["config"]["text"]
        wait_for(lambda: page.get("job", id=started["job"]["id"])["status"] == "done")
        replay(started["commands"][1].replace("one/", "two/"))
        assert weights(project / "one" / "run") == weights(project / "two" / "run")
        row = page.get("runs")
        assert len(replay(f"{row['command']} --json")) == row["total"] == 2
        run = page.get("run", id="one/run")
        assert replay(f"{run['command']} --json")["steps"] == run["steps"] == 16
        actions = {own["id"]: own for own in run["actions"]}
        job = page.post("act", id="one/run", action="validate")["job"]
        wait_for(lambda: page.get("job", id=job["id"])["status"] == "done")
        report = page.get("report", id="one/run")
        again = replay(f"{actions['validate']['command']} --json")
        assert (again["verdict"], again["tuned_tally"]) == (report["verdict"], report["tuned_tally"])
        assert report["exchanges_counts"]["all"] == len(again["exchanges"])
        exported = page.post("act", id="one/run", action="export", to=["adapter"])
        wait_for(lambda: page.get("job", id=exported["job"]["id"])["status"] != "running")
        shown = page.get("export", id="one/run")
        assert shown["existing"]["is_ok"], shown["job"]
        known = json.loads((project / "one" / "run" / "export" / "proof.json").read_text())["artefacts"][0]["sha256s"]
        replay(exported["command"].replace("one/", "two/"))
        other = json.loads((project / "two" / "run" / "export" / "proof.json").read_text())["artefacts"][0]["sha256s"]
        names = [name for name in known if name.endswith(".safetensors")]
        assert names and [known[name] for name in names] == [other[name] for name in names]
        assert {own["path"]: own["bytes"] for own in shown["existing"]["artefacts"][0]["files"]}
        job = page.post("act", id="one/run", action="diagnose")["job"]
        wait_for(lambda: page.get("job", id=job["id"])["status"] != "running")
        replay(actions["diagnose"]["command"])
        replay(actions["resume"]["command"])  # it has ended, and says so
        replay(actions["stop"]["command"], codes=(2,))
        read = page.work("new/read", **request)[1]
        replay(f"{read['command']} --model model --out three.yaml")
    assert len(replayed) >= 10
