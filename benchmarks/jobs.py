"""What is the trained model worth on real jobs? A table of rate x batch x epochs x rank, judged by a neutral script.

    python benchmarks/jobs.py --scripts JOBS --model MODEL --out OUT           as `init` writes it, and TRL
    python benchmarks/jobs.py ... --rates 5e-4,1e-3 --batches 16,32,64 --epochs 2,3 --ranks 16,32 --parallel 6

Every run is a whole command as a user types it, `tunewell train ROWS --model MODEL`, with its verdict. The folder JOBS
has `make.py` (writes the rows of each job), `predict.py` and `score.py` (transformers and PEFT answer the test
questions) and `trl_job.py` (the peer). A run that is in OUT already is not repeated, so the command can be given again
after an interruption. With `--parallel`, times are those of runs beside each other.
"""

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setting import table, tunewell_command

KEYS = {
    "rate": "train.learning_rate",
    "batch": "train.batch_documents",
    "epochs": "train.epochs",
    "rank": "method.rank",
}
AUTO = dict.fromkeys(KEYS, "auto")
PEERS = {
    "TRL, packed 8 x 1,024": ("3", "1e-3", "32", "8", "pack"),
    "TRL, 64 rows": ("3", "1e-3", "32", "64", "rows"),
    "TRL, tutorial": ("3", "2e-4", "16", "8", "pack"),
}


def command(words: list[str], folder: Path, log: Path) -> tuple[int, float]:
    """Run a command in a folder; return its exit code and its time."""
    began = time.perf_counter()
    with log.open("w") as opened:
        code = subprocess.run(words, cwd=folder, stdout=opened, stderr=subprocess.STDOUT, check=False).returncode
    return code, time.perf_counter() - began


class Jobs:
    """Trains and judges on some jobs, and remembers each result in its folder."""

    def __init__(self, wanted: argparse.Namespace) -> None:
        self.wanted, self.out = wanted, Path(wanted.out).resolve()
        self.scripts, self.model = Path(wanted.scripts).resolve(), wanted.model
        if Path(self.model).exists():
            self.model = str(Path(self.model).resolve())

    def rows(self, job: str) -> Path:
        """Return the training rows of a job: all of them, or the first ones, or a sample of them."""
        number, seed = self.wanted.rows, self.wanted.sample
        if not (self.out / "data" / job).exists():
            words = [sys.executable, str(self.scripts / "make.py"), str(self.out / "data"), job]
            subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        path = self.out / "data" / job / "train.jsonl"
        if number is None:
            return path
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        if seed is not None:
            random.Random(seed).shuffle(lines)
        # A folder of its own, because a file of test rows beside the rows would be held out.
        path = self.out / "data" / f"{job}-{number}" / "rows.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(lines[:number]), encoding="utf-8")
        return path

    def judge(self, job: str, adapter: Path, folder: Path) -> dict[str, Any]:
        test = self.out / "data" / job / "test.jsonl"
        words = [sys.executable, str(self.scripts / "predict.py"), self.model, str(adapter), str(test), job]
        words += [str(self.wanted.questions or 10**9), str(self.wanted.answer_tokens)]
        command(words, folder, folder / "judge.log")
        lines = (folder / "judge.log").read_text(errors="replace").splitlines()
        found = [line.removeprefix("SCORE ") for line in lines if line.startswith("SCORE ")]
        return json.loads(found[-1]) if found else {}

    def ours(self, job: str, settings: dict[str, str], seed: int) -> dict[str, Any]:
        """Train as a user would, judge the adapter that the run recommends, and return the result."""
        name = "_".join([job, *(f"{key}-{value}" for key, value in settings.items()), f"seed-{seed}"])
        folder = self.out / "runs" / name
        if (folder / "result.json").is_file():
            return json.loads((folder / "result.json").read_text())
        folder.mkdir(parents=True, exist_ok=True)
        sets = [f"{KEYS[key]}={value}" for key, value in settings.items() if value != "auto"]
        sets += [f"seed={seed}", *(self.wanted.set or ())]
        rows = folder / "rows.jsonl"
        rows.write_bytes(self.rows(job).read_bytes())
        words = [*tunewell_command(), "train", rows.name, "--model", self.model]
        words += [part for text in sets for part in ("--set", text)]
        code, seconds = command(words, folder, folder / "log")
        run = folder / "run"
        if not (run / "outcome.json").is_file():
            return {"job": job, "name": "tunewell", **settings, "seed": seed, "failed": code}
        plan, outcome = (json.loads((run / f"{part}.json").read_text()) for part in ("plan", "outcome"))
        steps = sorted((run / "checkpoints").glob("step-*"))
        best = [step for step in steps if outcome.get("best_step") == int(step.name.partition("-")[2])]
        chosen = {"rate": plan["learning_rate"], "epochs": plan["epochs"], "batch": plan["batch_documents"]}
        result = {
            "job": job,
            "name": "tunewell",
            **{key: value["value"] for key, value in chosen.items()},
            "rank": plan["config"]["method"]["rank"],
            "seed": seed,
            "updates": plan["num_steps"]["value"],
            "wall": round(seconds, 1),
            "predicted": ((plan.get("prediction") or {}).get("seconds") or {}).get("expected"),
            **self.judge(job, (best or steps)[-1], folder),
        }
        (folder / "result.json").write_text(json.dumps(result))
        return result

    def peer(self, job: str, name: str) -> dict[str, Any]:
        """Train with TRL, which has no verdict, and judge its adapter."""
        epochs, rate, rank, rows, mode = PEERS[name]
        folder = self.out / "runs" / f"{job}_trl_{epochs}_{rate}_{rank}_{rows}_{mode}"
        if (folder / "result.json").is_file():
            return json.loads((folder / "result.json").read_text())
        folder.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, str(self.scripts / "trl_job.py"), self.model, str(self.rows(job)), "adapter"]
        _, seconds = command([*words, epochs, rate, rank, rows, mode], folder, folder / "log")
        lines = (folder / "log").read_text(errors="replace").splitlines()
        found = [json.loads(line.removeprefix("TRL ")) for line in lines if line.startswith("TRL ")]
        settings = {"rate": float(rate), "epochs": float(epochs), "batch": int(rows), "rank": int(rank), "seed": 0}
        result = {"job": job, "name": name, **settings}
        if not found:
            return result | {"failed": 1}
        result |= {"updates": found[-1]["steps"], "wall": round(seconds, 1)}
        result |= self.judge(job, folder / "adapter", folder)
        (folder / "result.json").write_text(json.dumps(result))
        return result


def lines_of(results: list[dict[str, Any]]) -> str:
    head = ["job", "run", "rate", "rows per update", "epochs", "rank", "seed", "updates", "right", "of", "%", "wall s"]
    rows: list[list[str]] = []
    for own in sorted(results, key=lambda one: (one["job"], -one.get("value", -1.0))):
        share = f"{100 * own['value']:.1f}" if "value" in own else f"failed ({own.get('failed', 'not judged')})"
        keys = ("rate", "batch", "epochs", "rank", "seed", "updates", "right", "of")
        shown = [str(own.get(key) if own.get(key) is not None else "-") for key in keys]
        rows.append([own["job"], own["name"], *shown, share, str(own.get("wall", "-"))])
    return table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scripts", required=True, help="folder with make.py, predict.py, score.py and trl_job.py")
    parser.add_argument("--model", required=True, help="a folder in transformers format, or a hub id")
    parser.add_argument("--out", required=True)
    parser.add_argument("--jobs", default="banking77,snips_json,nl2bash,wikisql,pubmedqa")
    for key in KEYS:
        parser.add_argument(f"--{key if key == 'epochs' else key + ('es' if key == 'batch' else 's')}", default="auto")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--rows", type=int, help="use only this many training rows")
    parser.add_argument("--sample", type=int, help="with --rows: a sample with this seed, instead of the first rows")
    parser.add_argument("--questions", type=int, help="judge on this many test questions")
    parser.add_argument("--answer-tokens", type=int, default=96)
    parser.add_argument("--set", action="append", help="a further setting of every run")
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--without-peers", action="store_true")
    wanted = parser.parse_args()
    jobs, names = Jobs(wanted), wanted.jobs.split(",")
    lists = [getattr(wanted, own).split(",") for own in ("rates", "batches", "epochs", "ranks")]
    grid = [dict(zip(KEYS, values, strict=True)) for values in itertools.product(*lists)]
    grid = [AUTO, *(own for own in grid if own != AUTO)]
    for job in names:
        jobs.rows(job)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with ThreadPoolExecutor(wanted.parallel) as pool:
        seeds = [int(seed) for seed in wanted.seeds.split(",")]
        waiting = [pool.submit(jobs.ours, job, own, seed) for job in names for own in grid for seed in seeds]
        if not wanted.without_peers:
            waiting += [pool.submit(jobs.peer, job, name) for job in names for name in PEERS]
        results = [one.result() for one in waiting]
    print(lines_of(results))
    (jobs.out / "results.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
