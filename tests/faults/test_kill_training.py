"""SIGKILL at any step and at any write of a run: what comes after is bit for bit the run that nobody disturbed.

Each run is a forked child of this process, so that a kill is real and torch is imported once. Five kills are tried by
default; `make faults` tries every one.
"""

import hashlib
import os
import signal
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from tiny_runs import Remembering, make_run
from write_faults import kill_this_process_at

from forked import in_child
from tunewell.records.events import read_events
from tunewell.training.engine import train
from tunewell.training.events import StepTaken
from tunewell.training.run import resume

pytestmark = pytest.mark.slow

STEPS = 28
# 23 documents in steps of 2 are 12 steps an epoch, so 28 steps are over two epochs; dropout is on.
PLANS: dict[int, dict[str, Any]] = {
    1: {"num_steps": STEPS, "batch_documents": 2, "micro_batch_tokens": 10_000, "save_every": 3, "evaluate_every": 6},
    3: {"num_steps": STEPS, "batch_documents": 2, "micro_batch_tokens": 1, "save_every": 3, "evaluate_every": 6},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "lora": {},
    "nf4": {"method": {"rank": 4, "dropout": 0.2, "quantize": "nf4"}},
    "int8": {"method": {"rank": 4, "dropout": 0.2, "quantize": "int8"}},
    "dora": {"method": {"rank": 4, "dropout": 0.2, "kind": "dora"}},
    "adamw8bit": {"method": {"kind": "full"}, "train": {"optimizer": "adamw8bit"}},
    "galore": {
        "method": {"kind": "full"},
        "train": {"optimizer": "galore", "galore_rank": 8, "galore_every": 7},
    },
    "galore 8-bit": {
        "method": {"kind": "full"},
        "train": {"optimizer": "galore", "galore_rank": 8, "galore_every": 7, "galore_8bit": True},
    },
    "dora on nf4, 8-bit moments": {
        "method": {"rank": 4, "dropout": 0.2, "kind": "dora", "quantize": "nf4"},
        "train": {"optimizer": "adamw8bit"},
    },
}
TIMES = ("seconds", "memory_bytes", "phases")


class _Killer(Remembering):
    """Kills its own process once a step's event is on disk."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at = at

    def __call__(self, event: Any) -> None:
        if isinstance(event, StepTaken) and event.step == self._at:
            os.kill(os.getpid(), signal.SIGKILL)


def _begin_or_go_on(folder: Path, accumulation: int, *, kill_at: int | None = None, method: str = "lora") -> None:
    # As in the plan. Intervals of `auto` are made longer on a slow machine, and the logs would then differ.
    config = CONFIGS[method] | {"evaluate": {"every_steps": 6}, "checkpoints": {"every_steps": 3}}
    plan = PLANS[accumulation] | {"method": config.get("method", {}).get("kind", "lora")}
    run = make_run(folder, plan=plan, config=config)
    saved = run.checkpoints.newest()
    if saved is None:
        run.events.truncate_to(-1)
    else:
        resume(run, run.checkpoints.load(saved))
    if kill_at is not None:
        run.listener = _Killer(kill_at)
    assert train(run).status == "finished"
    (folder / "state").write_text(_digest(run))


def _digest(run: Any) -> str:
    digest = hashlib.sha256()
    tensors = {**run.learner.parameters, **run.learner.optimizer.state_tensors()}
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].detach().numpy().tobytes())
    return digest.hexdigest()


def _log(folder: Path) -> list[dict[str, Any]]:
    events = read_events(folder / "events.jsonl")
    return [{key: value for key, value in event.items() if key not in TIMES} for event in events]


@cache
def _undisturbed(accumulation: int, method: str = "lora") -> Path:
    # In this process: nobody kills it, and the children after it need not import what it imported.
    folder = Path(mkdtemp(prefix="tunewell-undisturbed-")) / "run"
    torch.set_num_threads(1)
    _begin_or_go_on(folder, accumulation, method=method)
    return folder


def _assert_same(folder: Path, accumulation: int, method: str = "lora") -> None:
    whole = _undisturbed(accumulation, method)
    assert (folder / "state").read_text() == (whole / "state").read_text()
    assert _log(folder) == _log(whole)


def _kill_at_step(tmp_path: Path, accumulation: int, step: int, method: str = "lora") -> None:
    folder = tmp_path / f"{accumulation}-{step}"
    _undisturbed(accumulation, method)
    is_killed = in_child(lambda: _begin_or_go_on(folder, accumulation, kill_at=step, method=method))
    assert is_killed == -signal.SIGKILL
    assert in_child(lambda: _begin_or_go_on(folder, accumulation, method=method)) == 0
    _assert_same(folder, accumulation, method)


@pytest.mark.parametrize(("accumulation", "step"), [(1, 1), (3, 12), (1, STEPS)])
def test_a_run_killed_at_a_step_ends_as_if_it_had_not_been(tmp_path: Path, accumulation: int, step: int) -> None:
    _kill_at_step(tmp_path, accumulation, step)


@pytest.mark.parametrize(
    ("method", "step"),
    [
        ("nf4", 12),
        ("int8", 12),
        ("dora", 12),
        ("adamw8bit", 20),
        ("galore", 5),
        ("galore 8-bit", 9),
        pytest.param("dora on nf4, 8-bit moments", 7, marks=pytest.mark.slow),
    ],
)
def test_a_run_of_any_method_that_is_killed_ends_as_if_it_had_not_been(tmp_path: Path, method: str, step: int) -> None:
    """Codes, scales, bases and the schedule of their refreshes go on from the checkpoint before."""
    _kill_at_step(tmp_path, 3, step, method)


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("method", ["adamw8bit", "galore"])
@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_a_run_with_small_states_killed_at_every_step_ends_as_if_it_had_not_been(
    tmp_path: Path, method: str, step: int
) -> None:
    _kill_at_step(tmp_path, 3, step, method)


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("accumulation", PLANS)
@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_a_run_killed_at_every_step_ends_as_if_it_had_not_been(tmp_path: Path, accumulation: int, step: int) -> None:
    _kill_at_step(tmp_path, accumulation, step)


def _kill_at_write(tmp_path: Path, call: int) -> bool:
    """Kill a run before its so-manyth change of the disk; say whether it came so far."""
    folder = tmp_path / f"write-{call}"

    def disturbed() -> None:
        kill_this_process_at(call)
        _begin_or_go_on(folder, 1)

    code = in_child(disturbed)
    if code == 0:
        return False
    assert code == -signal.SIGKILL
    assert in_child(lambda: _begin_or_go_on(folder, 1)) == 0
    _assert_same(folder, 1)
    return True


@pytest.mark.parametrize("call", [3, 21, 40, 71, 104])
def test_a_run_killed_at_a_write_ends_as_if_it_had_not_been(tmp_path: Path, call: int) -> None:
    assert _kill_at_write(tmp_path, call)


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("block", range(12))
def test_a_run_killed_at_every_write_ends_as_if_it_had_not_been(tmp_path: Path, block: int) -> None:
    """The writes of a run: events, and of each checkpoint every file, fsync, rename and removal."""
    calls = range(block, 3_000, 12)
    tried = 0
    for call in calls:
        if not _kill_at_write(tmp_path, call):
            break
        tried += 1
    assert tried > 5


def test_a_run_killed_twice_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    folder = tmp_path / "twice"
    for step in (8, 17):
        assert in_child(lambda step=step: _begin_or_go_on(folder, 1, kill_at=step)) == -signal.SIGKILL
    assert in_child(lambda: _begin_or_go_on(folder, 1)) == 0
    _assert_same(folder, 1)
