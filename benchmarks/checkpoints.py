"""How fast are checkpoints written, compared with the disk itself?

    python benchmarks/checkpoints.py                            2 GB of state on the CPU
    python benchmarks/checkpoints.py --gigabytes 13 --device cuda

Every contender writes the same bytes to the same disk. `disk` is a plain write and fsync. `0.1.0` serialises a file,
writes it, hashes it, and hashes what it reads back, one file after the other. `save` is `Checkpoints.save`, from the
call until the checkpoint is safe; `blocked` is the part of it that training waits for. Contenders take turns.
"""

import argparse
import hashlib
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch

from tunewell.core.files import sha256_file, write_synced
from tunewell.training.checkpoints import Checkpoints, State, safetensors_parts

GB = 10**9
_WIDTH = 2048


def make_state(num_bytes: int, device: str) -> State:
    """Return weights and two moments of equal size, as full fine-tuning has them, with random values."""
    rows = num_bytes // (3 * 4 * _WIDTH * 8)
    weights = {f"layers.{number}.weight": torch.randn(rows, _WIDTH, device=device) for number in range(8)}
    moments = {f"{name}/{part}": weight * 0.5 for name, weight in weights.items() for part in ("exp_avg", "exp_avg_sq")}
    return State(1, tensors={"model.safetensors": weights, "optimizer.safetensors": moments})


def write_plainly(state: State, folder: Path) -> float:
    """Write the bytes of the state to one file after the other and flush them; nothing is hashed or compared."""
    parts = {
        name: safetensors_parts({key: value.cpu() for key, value in own.items()}) for name, own in state.tensors.items()
    }
    started = time.perf_counter()
    for name, content in parts.items():
        write_synced(folder / name, *content)
    return time.perf_counter() - started


def write_as_before(state: State, folder: Path) -> float:
    """Do what version 0.1.0 did."""
    copies = {name: {key: value.cpu() for key, value in own.items()} for name, own in state.tensors.items()}
    started = time.perf_counter()
    for name, own in copies.items():
        data = safetensors.torch.save(own)
        write_synced(folder / name, data)
        assert hashlib.sha256(data).hexdigest()
    for name in copies:
        assert sha256_file(folder / name)
    return time.perf_counter() - started


def main() -> None:
    """Measure, and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the state")
    parser.add_argument("--device", default="cpu", help="where the state is: cpu or cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, default=Path("benchmark-checkpoints"), help="a folder on the disk to test"
    )
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    state = make_state(int(arguments.gigabytes * GB), arguments.device)
    num_bytes = sum(tensor.nbytes for own in state.tensors.values() for tensor in own.values())
    checkpoints = Checkpoints(_emptied(folder / "saved"), keep=1, on_trouble=_fail)
    blocked: list[float] = []

    def save(state: State, folder: Path) -> float:
        shutil.rmtree(checkpoints.folder / "step-000001", ignore_errors=True)
        started = time.perf_counter()
        checkpoints.save(state)
        blocked.append(time.perf_counter() - started)
        checkpoints.wait()
        return time.perf_counter() - started

    contenders: dict[str, Callable[[State, Path], float]] = {
        "disk": write_plainly,
        "0.1.0": write_as_before,
        "save": save,
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    try:
        for number in range(arguments.rounds):
            for name in list(contenders)[:: -1 if number % 2 else 1]:
                plain = _emptied(folder / "plain")
                os.sync()
                seconds[name].append(contenders[name](state, plain))
    finally:
        shutil.rmtree(folder)
    disk = num_bytes / statistics.median(seconds["disk"])
    print(f"{num_bytes / GB:.1f} GB on {arguments.device}, medians of {arguments.rounds}; blocked, in order: ", end="")
    print(", ".join(f"{one:.2f} s" for one in blocked))
    print("\n| | s | MB/s | of the disk |\n|---|---:|---:|---:|")
    for name, own in seconds.items():
        rate = num_bytes / statistics.median(own)
        print(f"| {name} | {statistics.median(own):.2f} | {rate / 1e6:,.0f} | {rate / disk:.0%} |")


def _emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _fail(message: str) -> None:
    raise RuntimeError(message)


if __name__ == "__main__":
    main()
