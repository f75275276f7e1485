"""Two processes that train together make the steps that one makes alone."""

import ast
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tunewell.core.errors import UserError
from tunewell.training.distributed import World

_SCRIPT = """
import ast, sys, torch
sys.path.insert(0, sys.argv[1])
from lessons import RandomDocuments, lora_learner
from tunewell.config.schema import MethodSettings, Train
from tunewell.training.evaluate import held_out_loss
from tunewell.training.distributed import World
torch.set_num_threads(1)
world = World.initialise(torch.device("cpu"))
method = MethodSettings(rank=4, alpha=8, **ast.literal_eval(sys.argv[3]))
learner = lora_learner(train=Train(adam_epsilon=1e-4), method=method, world=world)
documents = RandomDocuments()
numbers = []
for number, chosen in enumerate([list(range(11)), [11], list(range(12, 24))]):
    numbers.append(learner.take_step(documents.batches(chosen, 60), number=number, rate=1e-3).read())
found = held_out_loss(learner, documents, budget=60, most=None)
assert world.any(world.rank == world.size - 1) and not world.any(False)
if world.is_first:
    torch.save({"numbers": numbers, "held_out": found.loss, "weights": dict(learner.parameters)}, sys.argv[2])
world.shut_down()
"""


_LEAN = """
import json, sys, torch
sys.path.insert(0, sys.argv[1])
from lessons import RandomDocuments, tiny_llama
from tunewell.config.schema import MethodSettings, Train
from tunewell.methods.full import Full
from tunewell.training.distributed import World
from tunewell.training.step import TrainableModel
torch.set_num_threads(1)
world = World.initialise(torch.device("cpu"))
model = tiny_llama(hidden_size=64)
Full.apply(model, MethodSettings(kind="full"))
first, settings = json.loads(sys.argv[3])
learner = TrainableModel(model, "fp32", 40, settings=Train(adam_epsilon=1e-4, **settings), world=world)
documents = RandomDocuments()
for number, chosen in enumerate([list(range(11)), [11], list(range(12, 24))]):
    learner.take_step(documents.batches(chosen, 60), number=first + number, rate=1e-3)
state = {**learner.parameters, **learner.optimizer.state_tensors()}
torch.save({name: own.detach() for name, own in state.items()}, f"{sys.argv[2]}.{world.rank}")
world.shut_down()
"""


_TROUBLES = """
import os, sys, torch
from tunewell.core.errors import UserError
from tunewell.training.distributed import World
world = World.initialise(torch.device("cpu"))
def refuse(ranks, error):
    try:
        with world.failing_together():
            if world.rank in ranks:
                raise error
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
told = [
    refuse([0, 1], UserError("no room", where="disk", fix="buy one")),
    refuse([0], UserError("no rows")),
    refuse([1], UserError("no model", fix="copy it")),
    refuse([1], ValueError("odd")),
    refuse([0], ValueError("odder")),
    refuse([], None),
]
if world.rank == 1:
    print(told, flush=True)
    os._exit(9)
try:
    with world.explaining_lost_ranks("again"):
        world.barrier()
except UserError as error:
    told.append(error.what)
print(told, flush=True)
os._exit(0)
"""


def _start(size: int, *line: str, **how: Any) -> list["subprocess.Popen[str]"]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    return [
        subprocess.Popen(
            [sys.executable, "-c", *line], env=os.environ | meeting | {"RANK": str(rank)}, text=True, **how
        )
        for rank in range(size)
    ]


def _run(tmp_path: Path, size: int, method: dict[str, Any]) -> dict:
    out = tmp_path / f"{size}.pt"
    started = _start(size, _SCRIPT, str(Path(__file__).parent), str(out), repr(method))
    assert [process.wait(120) for process in started] == [0] * size
    return torch.load(out, weights_only=False)


@pytest.mark.slow
@pytest.mark.parametrize("method", [{}, {"quantize": "nf4"}, {"quantize": "int8"}, {"kind": "dora"}], ids=str)
def test_two_processes_make_the_steps_of_one(tmp_path: Path, method: dict[str, Any]) -> None:
    """The second step has one document, so one of the two has nothing to do in it."""
    alone, together = _run(tmp_path, 1, method), _run(tmp_path, 2, method)
    torch.testing.assert_close(torch.tensor(together["numbers"]), torch.tensor(alone["numbers"]), rtol=1e-5, atol=1e-6)
    assert abs(together["held_out"] - alone["held_out"]) < 1e-6
    for name, weight in alone["weights"].items():
        torch.testing.assert_close(together["weights"][name], weight, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "settings", "tolerance"),
    [
        (0, {"optimizer": "adamw8bit"}, 1e-4),
        (101, {"optimizer": "galore", "galore_rank": 8}, 1e-6),
        (0, {"optimizer": "galore", "galore_rank": 8, "galore_every": 2}, 1e-5),
        (0, {"optimizer": "galore", "galore_rank": 8, "galore_every": 2, "galore_8bit": True}, 1e-4),
    ],
    ids=["adamw8bit", "galore, fixed basis", "galore", "galore, 8 bits"],
)
def test_two_processes_with_small_states_make_the_steps_of_one(
    tmp_path: Path, first: int, settings: dict[str, Any], tolerance: float
) -> None:
    """Projected gradients are summed over the processes; a new basis is equal in both to the last bit."""
    made = {}
    for size in (1, 2):
        out = tmp_path / f"{size}.pt"
        started = _start(size, _LEAN, str(Path(__file__).parent), str(out), json.dumps([first, settings]))
        assert [process.wait(120) for process in started] == [0] * size
        made[size] = [torch.load(f"{out}.{rank}") for rank in range(size)]
    [alone], (zeroth, other) = made[1], made[2]
    assert zeroth.keys() == other.keys() and all(torch.equal(own, other[name]) for name, own in zeroth.items())
    for name in (name for name in alone if "/" not in name):
        torch.testing.assert_close(zeroth[name], alone[name], rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_what_fails_in_one_fails_in_all_and_nobody_waits_for_one_that_is_gone() -> None:
    """Seven processes that wait for the eighth, or that call its error a bug, are what a cluster's user meets else."""
    started = _start(2, _TROUBLES, stdout=subprocess.PIPE)
    first, second = (ast.literal_eval(process.communicate(timeout=120)[0]) for process in started)
    assert [process.returncode for process in started] == [0, 9]
    same = ["SharedError: no room\n  where: disk\n  fix:   buy one", "SharedError: no rows"]
    assert first[:6] == [
        *same,
        "SharedError: rank 1 of 2: no model\n  fix:   copy it",
        "SharedError: rank 1 of 2: ValueError: odd\n  fix:   see what that process printed",
        "ValueError: odder",
        None,
    ]
    assert second == [
        *same,
        "SharedError: rank 1 of 2: no model\n  fix:   copy it",
        "ValueError: odd",
        "SharedError: rank 0 of 2: ValueError: odder\n  fix:   see what that process printed",
        None,
    ]
    assert first[6].startswith("rank 0 of 2 lost the connection to the others: ") and "gloo" not in first[6]


@pytest.mark.parametrize(
    ("num_gpus", "env", "place"),
    [
        (2, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, 1),
        (1, {"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "3"}, 0),  # as `srun --gpus-per-task=1` has it
        (1, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, None),
        (1, {"LOCAL_RANK": "1"}, None),
        (2, {}, "any"),
    ],
)
def test_each_process_has_a_gpu_of_its_own(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, env: dict[str, str], place: int | str | None
) -> None:
    taken: list[int | str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    if place is None:
        with pytest.raises(UserError, match="2 processes were started on this host, which has 1 GPU"):
            World.select_gpu("auto")
    else:
        World.select_gpu("auto")
    assert taken == ([] if place in (None, "any") else [place])


def test_a_cpu_needs_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "7")
    World.select_gpu("cpu")


def test_processes_that_cannot_meet_are_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match="distributed initialisation failed: 2 processes could not connect: "):
        World.initialise(torch.device("cpu"))
