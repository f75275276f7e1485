"""`tunewell train` on CUDA as a person runs it: alone, and on two machines that talk by NCCL.

The two machines are processes on one GPU: NCCL takes processes with names of their own for machines, and lets them talk
over a socket.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from corpora import write_sums
from tunewell.records.events import read_events

pytestmark = pytest.mark.gpu
SETTINGS = [
    "train.max_steps=24",
    "train.batch_documents=16",
    "train.learning_rate=3e-4",
    "evaluate.every_steps=8",
    "evaluate.samples=2",
    "evaluate.sample_tokens=8",
    "checkpoints.every_steps=8",
    "data.held_out=0.2",
]


@pytest.fixture
def project(tmp_path: Path, tiny_model: Path) -> Path:
    """A folder with rows and a config for a model that starts from nothing."""
    write_sums(tmp_path, tiny_model, model="preset:tiny-23m", num_rows=200)
    return tmp_path


def _start(project: Path, *arguments: str, sets: tuple[str, ...] = (), **env: str) -> "subprocess.Popen[str]":
    chosen = [part for setting in (*SETTINGS, *sets) for part in ("--set", setting)]
    line = [sys.executable, "-m", "tunewell", "train", *arguments, *chosen]
    return subprocess.Popen(
        line, cwd=project, env=os.environ | env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def _start_two(project: Path, *arguments: str, sets: tuple[str, ...] = ()) -> list["subprocess.Popen[str]"]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    talking = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    shared = meeting | talking | {"LOCAL_RANK": "0"}
    names = [{"RANK": str(rank), "NCCL_HOSTID": f"host{rank}"} for rank in range(2)]
    return [_start(project, *arguments, sets=sets, **shared, **name) for name in names]


def _end(started: "subprocess.Popen[str]") -> str:
    try:
        told, _ = started.communicate(timeout=150)
    finally:
        started.kill()
    assert "Traceback" not in told, told
    return told


def _losses(run: Path) -> list[tuple[int, Any]]:
    return [(event["step"], event["loss"]) for event in read_events(run / "events.jsonl") if event["kind"] == "step"]


def _near(run: Path) -> list[tuple[int, Any]]:
    return [(step, pytest.approx(loss, rel=2e-2)) for step, loss in _losses(run)]


@pytest.mark.parametrize(("compiling", "is_judged"), [("off", True), ("on", False)])
def test_two_machines_train_one_run(project: Path, compiling: str, is_judged: bool) -> None:
    """The same losses as one process has, and one run folder; the first one judges."""
    how = (
        f"train.compile={compiling}",
        "train.micro_batch_tokens=256",
        f"verdict.after_training={is_judged}",
    )
    alone = _start(project, "--out", "alone", sets=how)
    told = _end(alone)
    verdict = 3 if is_judged else 0  # weak: so few steps teach the words, not the sums
    assert alone.returncode == verdict, told
    assert len(_losses(project / "alone")) == 24
    both = _start_two(project, "--out", "together", sets=how)
    told = [_end(started) for started in both]
    assert [started.returncode for started in both] == [verdict, 0], told
    assert not any("Warning" in text for text in told), told
    assert _losses(project / "together") == _near(project / "alone")
    assert len(list((project / "together" / "checkpoints").iterdir())) == 2


def test_a_signal_ends_both_and_both_go_on(project: Path) -> None:
    """The cluster's scheduler sends it to all of them; what is resumed ends as if there had been none."""
    how = ("train.micro_batch_tokens=256", "verdict.after_training=false", "train.max_steps=80", "train.compile=off")
    both = _start_two(project, "--out", "run", sets=how)
    events = project / "run" / "events.jsonl"
    deadline = time.monotonic() + 100
    while not (events.exists() and len(_losses(project / "run")) >= 12) and time.monotonic() < deadline:
        time.sleep(0.05)
    for started in both:
        started.send_signal(signal.SIGTERM)
    told = [_end(started) for started in both]
    assert [started.returncode for started in both] == [143, 143], told
    done = len(_losses(project / "run"))
    assert 12 <= done < 80
    both = _start_two(project, "--out", "run", "--resume", sets=how)
    told = [_end(started) for started in both]
    assert [started.returncode for started in both] == [0, 0], told
    assert [step for step, _ in _losses(project / "run")] == list(range(1, 81))
