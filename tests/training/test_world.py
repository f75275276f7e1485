"""Two processes that train together make the steps that one makes alone."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import torch

_SCRIPT = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from lessons import RandomDocuments, lora_learner
from tunewell.config.schema import Train
from tunewell.training.held_out import held_out_loss
from tunewell.training.world import World
torch.set_num_threads(1)
world = World.join(torch.device("cpu"))
learner = lora_learner(train=Train(adam_epsilon=1e-4), world=world)
documents = RandomDocuments()
numbers = []
for number, chosen in enumerate([list(range(11)), [11], list(range(12, 24))]):
    numbers.append(learner.take_step(documents.batches(chosen, 60), number=number, rate=1e-3).read())
found = held_out_loss(learner, documents, budget=60, most=None)
assert world.any(world.rank == world.size - 1) and not world.any(False)
if world.is_first:
    torch.save({"numbers": numbers, "held_out": found.loss, "weights": dict(learner.parameters)}, sys.argv[2])
world.leave()
"""


def _run(tmp_path: Path, size: int) -> dict:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out = tmp_path / f"{size}.pt"
    line = [sys.executable, "-c", _SCRIPT, str(Path(__file__).parent), str(out)]
    meeting = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [subprocess.Popen(line, env=os.environ | meeting | {"RANK": str(rank)}) for rank in range(size)]
    assert [process.wait(120) for process in started] == [0] * size
    return torch.load(out, weights_only=False)


def test_two_processes_make_the_steps_of_one(tmp_path: Path) -> None:
    """The second step has one document, so one of the two has nothing to do in it."""
    alone, together = _run(tmp_path, 1), _run(tmp_path, 2)
    torch.testing.assert_close(torch.tensor(together["numbers"]), torch.tensor(alone["numbers"]), rtol=1e-5, atol=1e-6)
    assert abs(together["held_out"] - alone["held_out"]) < 1e-6
    for name, weight in alone["weights"].items():
        torch.testing.assert_close(together["weights"][name], weight, rtol=1e-6, atol=1e-6)
