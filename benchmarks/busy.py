"""Benchmark training on a CPU beside other work: how much of its speed does a run keep?

    python benchmarks/busy.py                                   three rounds, about ten minutes
    python benchmarks/busy.py --environment GOMP_SPINCOUNT=0    the same with other settings of OpenMP

Each round is one `tunewell train` of SmolLM2-135M (LoRA, GSM8K) that is watched from outside: some steps alone, some
beside one busy process per core, some alone again. The share is the speed beside other work, divided by the mean of the
speeds before and after. Bar: at least 50%, the fair share of two cores with two other processes.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

from setting import MODEL, setting, table, tunewell_command, write_rows

BUSY = "while True: pass"


def main() -> int:
    """Run the rounds and print a table."""
    parser = argparse.ArgumentParser(description="Time training beside other work on a CPU.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="steps in each of the three phases")
    parser.add_argument("--environment", nargs="*", default=[], metavar="NAME=VALUE")
    wanted = parser.parse_args()
    print(setting("torch", "tunewell"), flush=True)
    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        origin = write_rows(folder / "rows.jsonl", 600)
        own = os.environ | dict(text.split("=", 1) for text in wanted.environment)
        for number in range(1, wanted.rounds + 1):
            rates = one_round(folder, folder / f"run-{number}", wanted.steps, own)
            share = 2 * rates[1] / (rates[0] + rates[2])
            rows.append((*rates, share))
            print(
                f"round {number}: " + ", ".join(f"{rate:.1f}" for rate in rates) + f" tokens/s, {share:.0%}", flush=True
            )
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    lines = [
        [name, *(f"{value:.1f}" for value in row[:3]), f"{row[3]:.0%}"]
        for name, row in [*((f"round {at}", row) for at, row in enumerate(rows, 1)), ("median", medians)]
    ]
    print(f"{origin}; {' '.join(wanted.environment) or 'default environment'}")
    print(table(["", "alone, tokens/s", "beside other work", "alone again", "share"], lines))
    return 0


def one_round(folder: Path, run: Path, steps: int, environment: Any) -> list[float]:
    """Train in three phases and return the tokens per second of each."""
    line = [*tunewell_command(), "train", "--data", "rows.jsonl", "--model", MODEL, "--out", str(run), "--no-validate"]
    sets = ["train.max_steps=500", "evaluate.samples=0", "data.held_out=0", "train.batch_tokens=512", "device=cpu"]
    line += [f"--set={text}" for text in sets]
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(line, cwd=folder, env=environment, stdout=log, stderr=log)
    busy: list[subprocess.Popen[bytes]] = []
    try:
        marks = [2, 2 + steps, 2 + 2 * steps, 2 + 3 * steps]
        for phase in range(4):
            while len(read_steps(run)) < marks[phase]:
                if process.poll() is not None:
                    print((folder / "log.txt").read_text()[-3000:], file=sys.stderr)
                    raise SystemExit(f"`tunewell train` ended with {process.returncode}")
                time.sleep(0.2)
            if phase == 1:
                busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(os.cpu_count() or 2)]
            elif phase == 2:
                stop(busy)
    finally:
        stop(busy)
        process.send_signal(signal.SIGTERM)
        process.wait()
    taken = read_steps(run)
    # The first step of a phase belongs partly to the phase before.
    phases = [taken[start + 1 : start + steps] for start in marks[:3]]
    return [sum(step["tokens"] for step in phase) / sum(step["seconds"] for step in phase) for phase in phases]


def stop(processes: list["subprocess.Popen[bytes]"]) -> None:
    for process in processes:
        process.kill()
        process.wait()


def read_steps(run: Path) -> list[dict[str, Any]]:
    """Return the steps that a run has taken so far."""
    file = run / "events.jsonl"
    lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.is_file() else []
    return [event for event in map(json.loads, lines) if event["kind"] == "step"]


if __name__ == "__main__":
    raise SystemExit(main())
