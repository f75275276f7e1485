"""Benchmark work with many runs: the list, a sweep against separate commands, the stored base model, a hanging tracker.

    python benchmarks/runs.py list       1,000 run folders
    python benchmarks/runs.py sweep      3 rates x 2 ranks on a tiny model, against six commands; losses to the bit
    python benchmarks/runs.py base       `validate` twice on SmolLM2-135M: the second does not measure the base
    python benchmarks/runs.py tracker    a run with a tracker that hangs, against one without

Seconds are wall-clock seconds and, on a busy machine more telling, CPU seconds of the commands and their children.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

from setting import MODEL, setting, table, write_rows

RATES, RANKS = ("1e-4", "3e-4", "1e-3"), ("8", "32")
TINY = ("--model", "preset:tiny-1m", "--set", f"tokenizer={MODEL}", "--set", "train.threads=1")


def main() -> int:
    """Run one benchmark in a temporary folder, with an empty cache of base models."""
    parser = argparse.ArgumentParser(description="Time work with many runs.")
    parser.add_argument("what", choices=("list", "sweep", "base", "tracker"))
    wanted = parser.parse_args()
    print(setting("torch", "transformers", "tunewell"), flush=True)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        os.environ["TUNEWELL_CACHE"] = str(folder / "cache")
        {"list": time_list, "sweep": time_sweep, "base": time_base, "tracker": time_tracker}[wanted.what](folder)
    return 0


def command(folder: Path, *words: str, codes: tuple[int, ...] = (0, 3, 4)) -> tuple[float, float]:
    """Run a command; return its wall-clock and CPU seconds."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "tunewell", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "CI": "1"},
    )
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in codes:
        raise SystemExit(f"{words}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def time_list(folder: Path) -> None:
    write_rows(folder / "rows.jsonl", 60)
    command(folder, "train", *TINY, "--data", "rows.jsonl", "--set", "train.max_steps=20", "--out", "runs/first")
    for number in range(999):
        shutil.copytree(folder / "runs" / "first", folder / "runs" / f"copy-{number}", ignore=_no_checkpoints)
    rows = []
    for words in (("runs", "runs"), ("runs", "runs", "--json"), ("--version",)):
        times = [command(folder, *words) for _ in range(5)]
        rows.append([f"`tunewell {' '.join(words)}`", *(f"{min(part):.2f}" for part in zip(*times, strict=True))])
    print(table(["best of five", "seconds", "CPU seconds"], rows))


def _no_checkpoints(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name == "checkpoints"]


def time_sweep(folder: Path) -> None:
    write_rows(folder / "rows.jsonl", 120)
    same = (*TINY, "--data", "rows.jsonl", "--set", "train.max_steps=40")
    separate = [0.0, 0.0]
    for rate in RATES:
        for rank in RANKS:
            sets = ("--set", f"train.learning_rate={rate}", "--set", f"method.rank={rank}")
            times = command(folder, "train", *same, *sets, "--out", f"separate/{rate}-{rank}")
            separate = [sum(pair) for pair in zip(separate, times, strict=True)]
    sets = ("--set", f"train.learning_rate={','.join(RATES)}", "--set", f"method.rank={','.join(RANKS)}")
    shutil.rmtree(folder / "cache" / "base")
    swept = command(folder, "sweep", *same, *sets)
    rows = [
        [name, *(f"{seconds:.1f}" for seconds in times)]
        for name, times in (("six commands", separate), ("one sweep", swept))
    ]
    rows.append(["share", *(f"{new / old:.2f}" for new, old in zip(swept, separate, strict=True))])
    print(table(["", "seconds", "CPU seconds"], rows))
    num_equal = 0
    for run in json.loads((folder / "sweep" / "sweep.json").read_text())["runs"]:
        settings = run["settings"]
        other = folder / "separate" / f"{settings['train.learning_rate']}-{settings['method.rank']}"
        num_equal += losses(folder / "sweep" / run["name"]) == losses(other)
    print(f"{num_equal} of 6 runs have the same losses as their separate command, to the bit")


def losses(run: Path) -> list[tuple[str, int, float]]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [(event["kind"], event["step"], event["loss"]) for event in events]


def time_base(folder: Path) -> None:
    origin = write_rows(folder / "rows.jsonl", 400)
    sets = ("--set", "train.max_steps=2", "--set", "verdict.questions=24", "--set", "verdict.max_documents=40")
    sets += ("--set", "evaluate.max_documents=4", "--set", "evaluate.samples=0", "--set", "data.held_out=0.1")
    command(folder, "train", "--model", MODEL, "--data", "rows.jsonl", *sets, "--no-validate", "--out", "run")
    rows = []
    for name in ("first", "second"):
        times = command(folder, "validate", "run", "--out", name)
        report = json.loads((folder / name / "report.json").read_text())
        rows.append([f"{name} `validate`", *(f"{seconds:.1f}" for seconds in times), str(report["base_measured_at"])])
    share = [f"{float(new) / float(old):.2f}" for old, new in zip(rows[0][1:3], rows[1][1:3], strict=True)]
    print(f"{origin}, 24 questions, {MODEL}")
    print(table(["", "seconds", "CPU seconds", "base measured"], [*rows, ["share", *share, ""]]))


def time_tracker(folder: Path) -> None:
    write_rows(folder / "rows.jsonl", 120)
    package = folder / "hanging"
    package.mkdir()
    (package / "tensorboard.py").write_text("import time\nwhile True: time.sleep(1)\n")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(package)]))
    same = ("train", *TINY, "--data", "rows.jsonl", "--set", "train.max_steps=300", "--no-validate")
    rows = []
    for number in range(3):
        for name, sets in (("without", ()), ("hanging", ("--set", "track=[tensorboard]"))):
            times = command(folder, *same, *sets, "--out", f"{name}-{number}")
            outcome = json.loads((folder / f"{name}-{number}" / "outcome.json").read_text())
            steps = f"{outcome['steps']}"
            rows.append([name, steps, f"{outcome['stages']['train']:.2f}", *(f"{seconds:.2f}" for seconds in times)])
    print(table(["tracker", "steps", "seconds in steps", "seconds", "CPU seconds"], rows))


if __name__ == "__main__":
    raise SystemExit(main())
