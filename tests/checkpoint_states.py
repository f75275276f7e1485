"""Small states of a run, and what lies in a folder of checkpoints."""

from pathlib import Path

import torch

from tunewell.training.checkpoints import Checkpoints, State

FILES = ["adapter/adapter_model.safetensors", "optimizer.safetensors", "state.json"]


def state_at(step: int) -> State:
    """Make a state whose every number follows from its step: two tensor files, one of them in a folder, and a text."""
    chance = torch.Generator().manual_seed(step)
    return State(
        step=step,
        tensors={
            "adapter/adapter_model.safetensors": {
                "lora_A": torch.randn(3, 5, generator=chance),
                "lora_B": torch.randn(5, 3, generator=chance).to(torch.bfloat16),
            },
            "optimizer.safetensors": {
                "lora_A/exp_avg": torch.randn(3, 5, generator=chance),
                "lora_A/step": torch.tensor(float(step)),
                "rng": torch.arange(7, dtype=torch.uint8) + step,
            },
        },
        texts={"state.json": f'{{"position": {step * 100}}}\n'},
        progress={"best_loss": 2.5 / (step + 1), "quarantine": [3, step]},
        identity={"seed": 0, "train": {"learning_rate": 2e-4}, "corpus_sha256": "ab" * 32},
    )


def filled(folder: Path, steps: list[int], *, best: int | None = None, keep: int = 2) -> list[str]:
    """Save several states one after the other; give what was told."""
    told: list[str] = []
    checkpoints = Checkpoints(folder, keep=keep, on_trouble=told.append)
    for step in steps:
        checkpoints.save(state_at(step), is_best=step == best)
    checkpoints.wait()
    return told


def same(one: State, other: State) -> bool:
    """Compare two states to the last bit."""
    if (one.step, one.texts, one.progress, one.identity) != (other.step, other.texts, other.progress, other.identity):
        return False
    if {file: set(tensors) for file, tensors in one.tensors.items()} != {
        file: set(tensors) for file, tensors in other.tensors.items()
    }:
        return False
    return all(
        tensor.dtype == other.tensors[file][name].dtype and torch.equal(tensor, other.tensors[file][name])
        for file, tensors in one.tensors.items()
        for name, tensor in tensors.items()
    )


def names(folder: Path) -> list[str]:
    """List what lies in a folder."""
    return sorted(entry.name for entry in folder.iterdir())
