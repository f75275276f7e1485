"""Plant a bottleneck, ask `tunewell profile --apply` for it, and compare the predicted with the measured gain.

python benchmarks/bottlenecks.py                 all six, on the CPU (about ten minutes on two cores)
python benchmarks/bottlenecks.py threads data    some of them
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests" / "data"))

BASE = {
    "model": "preset:tiny-1m",
    "device": "cpu",
    "data": {"sources": "rows.jsonl"},
    "method": {"kind": "full"},
    "train": {"max_steps": 200, "batch_tokens": 1024, "micro_batch_tokens": 1024, "threads": 1},
    "evaluate": {"samples": 2, "sample_tokens": 8, "max_documents": 8, "every_steps": 100},
    "checkpoints": {"every_steps": 100},
}
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    # name of the bottleneck -> the setting or fault that plants it, and the key that must be named
    "data": ("slow@read:seconds=0.01", {}, "train.read_ahead"),
    "checkpoint": ("", {"checkpoints": {"every_steps": 1}, "train": {"batch_tokens": 128}}, "checkpoints.every_steps"),
    "threads": ("", {"train": {"threads": 32}}, "train.threads"),
    "micro-batch": ("", {"train": {"micro_batch_tokens": 16}}, "train.micro_batch_tokens"),
    "evaluation": (
        "",
        {"evaluate": {"every_steps": 2, "samples": 8, "sample_tokens": 32, "max_documents": 40}},
        "evaluate.every_steps",
    ),
}


def write_project(folder: Path, settings: dict[str, Any]) -> None:
    from tiny import write_tiny_model

    write_tiny_model(folder / "tokenizer")
    rows = (ROOT / "examples" / "college" / "train.jsonl").read_text(encoding="utf-8")
    (folder / "rows.jsonl").write_text(rows, encoding="utf-8")
    config = {
        name: {**value, **settings.get(name, {})} if isinstance(value, dict) else settings.get(name, value)
        for name, value in BASE.items()
    }
    config["tokenizer"] = "tokenizer"
    (folder / "tunewell.yaml").write_text(json.dumps(config), encoding="utf-8")


def profile(name: str, num_steps: int, record: Path | None) -> bool:
    fault, settings, key = CASES[name]
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        write_project(folder, settings)
        env = os.environ | ({"TUNEWELL_FAULTS": fault.format(folder=folder)} if fault else {})
        command = [sys.executable, "-m", "tunewell", "profile", "--steps", str(num_steps), "--apply", "--json"]
        command += ["--enable-fault-injection"]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        print(name, "failed:", done.stderr[-2000:])
        return False
    found = json.loads(done.stdout)
    if record is not None:
        found.get("applied", {}).pop("profile", None)
        (record / f"{name}.json").write_text(json.dumps(found) + "\n", encoding="utf-8")
    first = found["bottlenecks"][0] if found["bottlenecks"] else {"name": "none", "key": "", "gain_predicted": 1.0}
    predicted, measured = first["gain_predicted"], found.get("applied", {}).get("gain_measured", float("nan"))
    error = predicted / measured - 1
    profile = found["profile"]
    covered = 1 - profile["phases"].get("other", 0.0) / profile["total_seconds"]
    is_right = first["key"] == key and abs(error) <= 0.25 and covered >= 0.97
    print(
        f"{name:<12} {first['name']:<12} {first['key']:<26} predicted {predicted:6.2f} measured {measured:6.2f} "
        f"error {error:+6.1%}  covered {covered:.1%}  {'ok' if is_right else 'WRONG'}",
        flush=True,
    )
    print(f"    {found['verdict']}", flush=True)
    return is_right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="write what each profile printed to FOLDER")
    arguments = parser.parse_args()
    results = [profile(name, arguments.steps, arguments.record) for name in arguments.cases]
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
