"""Compare what the training methods learn: held-out losses after the same tokens. `methods.py quality` runs this.

The rate of a method is chosen among three on seed 0 with a quarter of the steps; then two other seeds are trained.
Several processes take one training after the other (`quality_worker.py`).
"""

import argparse
import json
import math
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from clock import RESULT
from loads import CASES
from setting import MODEL, table, verdict, write_rows

HERE = Path(__file__).parent
ADAPTER_RATES, FULL_RATES, GALORE_RATES = (2e-4, 5e-4, 1e-3), (2e-5, 5e-5, 1e-4), (2e-4, 5e-4, 1e-3)
RATES = {
    "galore-torch": GALORE_RATES,  # first, because it takes longest
    "galore": GALORE_RATES,
    "adamw8bit": FULL_RATES,
    "adamw-bf16": FULL_RATES,
    "adamw": FULL_RATES,
    "nf4-peft": ADAPTER_RATES,
    "nf4": ADAPTER_RATES,
    "nf4-keep": ADAPTER_RATES,
    "int8": ADAPTER_RATES,
    "lora": ADAPTER_RATES,
}
TITLES = {
    "lora": "LoRA, base in 16 bits",
    "int8": "LoRA, base in int8",
    "nf4": "LoRA, base in NF4",
    "nf4-keep": "LoRA, base in NF4, `keep: auto`",
    "nf4-peft": "PEFT's layers on bitsandbytes' NF4",
    "adamw": "full, AdamW",
    "adamw-bf16": "full, AdamW, `masters: bf16`",
    "adamw8bit": "full, `adamw8bit`",
    "galore": "full, `galore`",
    "galore-torch": "full, galore-torch",
}
SEEDS = (1, 2)


class Trainings:
    """Trains every method at three rates, then with two seeds at its best rate, in several processes at once."""

    def __init__(self, folder: Path, wanted: argparse.Namespace) -> None:
        self.folder, self.wanted = folder, wanted
        self.results: list[dict[str, Any]] = []
        self._queue: queue.PriorityQueue[tuple[int, int, dict[str, Any]]] = queue.PriorityQueue()
        self._lock = threading.Lock()
        self._deadline = time.monotonic() + 60 * wanted.minutes
        self._left = 0
        for method in RATES:
            if not wanted.only or method in wanted.only:
                for rate in RATES[method]:
                    self._add(method, rate, seed=0, steps=max(2, wanted.steps // 4))

    def _add(self, method: str, rate: float, *, seed: int, steps: int) -> None:
        job = {"method": method, "rate": rate, "seed": seed, "steps": steps, "step_tokens": self.wanted.step_tokens}
        # Slow methods first. A method that has its rate goes on at once.
        place = list(RATES).index(method) - (len(RATES) if seed else 0)
        self._left += 1
        self._queue.put((place, self._left + 1000 * len(self.results), job))

    def run(self) -> None:
        """Start the processes and wait until all trainings are done or the time is over."""
        threads = [threading.Thread(target=self._work, args=(number,)) for number in range(self.wanted.processes)]
        for thread in threads:
            thread.start()
            time.sleep(0.5)  # not all imports at once
        for thread in threads:
            thread.join()

    def _work(self, number: int) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "2"}
        line = [sys.executable, HERE / "quality_worker.py", self.folder]
        with (
            (self.wanted.out / f"quality-{number}.log").open("w", encoding="utf-8") as log,
            subprocess.Popen(
                line, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            ) as worker,
        ):
            assert worker.stdin and worker.stdout
            timer = threading.Timer(max(1.0, self._deadline - time.monotonic()), worker.kill)
            timer.start()
            while (job := self._next()) is not None:
                result: dict[str, Any] = {"error": "the process ended"}
                try:
                    worker.stdin.write(json.dumps(job) + "\n")
                    worker.stdin.flush()
                    for text in worker.stdout:
                        if text.startswith(RESULT):
                            result = json.loads(text.removeprefix(RESULT))
                            break
                except OSError:
                    pass
                self._done(job | result)
                if worker.poll() is not None:
                    break
            timer.cancel()
            worker.stdin.close()

    def _next(self) -> dict[str, Any] | None:
        while time.monotonic() < self._deadline:
            with self._lock:
                if self._left == 0:
                    return None
            try:
                return self._queue.get(timeout=0.2)[2]
            except queue.Empty:
                continue
        return None

    def _done(self, result: dict[str, Any]) -> None:
        with self._lock:
            self.results.append(result)
            method = result["method"]
            first = [own for own in self.results if own["method"] == method and own["seed"] == 0]
            if result["seed"] == 0 and len(first) == len(RATES[method]):
                good = [own for own in first if "error" not in own and math.isfinite(own["held_out_loss"])]
                if good:
                    best = min(good, key=lambda own: own["held_out_loss"])
                    for seed in SEEDS:
                        self._add(method, best["rate"], seed=seed, steps=self.wanted.steps)
            self._left -= 1
            (self.wanted.out / "quality.json").write_text(json.dumps(self.results, indent=1), encoding="utf-8")
        loss = result.get("error") or f"{result['held_out_loss']:.4f} in {result['seconds']:.0f} s"
        print(f"{method} rate {result['rate']:g} seed {result['seed']} steps {result['steps']}: {loss}", flush=True)

    def losses(self, method: str) -> list[float]:
        """Return the held-out losses of the seeds."""
        own = [own for own in self.results if own["method"] == method and own["seed"] in SEEDS]
        return [one["held_out_loss"] for one in sorted(own, key=lambda one: one["seed"]) if "error" not in one]

    def rate(self, method: str) -> float | None:
        """Return the rate that was chosen."""
        return next((own["rate"] for own in self.results if own["method"] == method and own["seed"] in SEEDS), None)


def measure_quality(wanted: argparse.Namespace) -> None:
    """Held-out losses of every method after the same tokens."""
    is_smoke = wanted.cases == ["smoke"]
    if is_smoke:
        wanted.steps, wanted.step_tokens, wanted.processes = 4, 512, 2
    elif wanted.model is None or wanted.rows is None:
        raise SystemExit("quality needs --model FOLDER and --rows FILE")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, rows = (wanted.model, wanted.rows) if not is_smoke else smoke_inputs(folder)
        line = [sys.executable, HERE / "quality_worker.py", "--prepare", model, rows, folder]
        begun = time.monotonic()
        with (wanted.out / "quality-prepare.log").open("w", encoding="utf-8") as log:
            done = subprocess.run(line, stdout=subprocess.PIPE, stderr=log, text=True, check=False)
        if done.returncode:
            raise SystemExit((wanted.out / "quality-prepare.log").read_text(encoding="utf-8")[-3000:])
        about = next(text for text in done.stdout.splitlines() if text.startswith(RESULT)).removeprefix(RESULT)
        print(f"prepared in {time.monotonic() - begun:.0f} s: {about}", flush=True)
        (wanted.out / "quality-base.json").write_text(about, encoding="utf-8")
        trainings = Trainings(folder, wanted)
        trainings.run()
    print(
        "\n"
        + table(["method", "rate", "held-out loss, two seeds", "mean", "of LoRA or AdamW"], quality_rows(trainings))
    )
    quality_verdicts(trainings)


def smoke_inputs(folder: Path) -> tuple[Path, Path]:
    """Write a tiny model with SmolLM2's tokenizer, and some rows."""
    import torch
    from gpu_peers import random_model

    from tunewell.data.tokenizers.load import load_tokenizer

    torch.manual_seed(0)
    model = random_model(CASES["smoke"].shape, "sdpa")
    model.resize_token_embeddings(49_152)
    model.save_pretrained(folder / "tiny")
    tokenizer = load_tokenizer(MODEL)
    tokenizer.save(folder / "tiny", tokenizer.chat_template)
    write_rows(folder / "rows.jsonl", 60)
    return folder / "tiny", folder / "rows.jsonl"


def quality_rows(trainings: Trainings) -> list[list[str]]:
    """Return a row for each method."""
    rows = []
    for method, title in TITLES.items():
        losses, rate = trainings.losses(method), trainings.rate(method)
        base = trainings.losses("adamw" if RATES[method] is not ADAPTER_RATES else "lora")
        if not losses or rate is None:
            rows.append([title, "-", "-", "-", "-"])
            continue
        edge = " (the highest)" if rate == RATES[method][-1] else " (the lowest)" if rate == RATES[method][0] else ""
        mean = statistics.mean(losses)
        share = f"{mean / statistics.mean(base) - 1:+.2%}" if base else "-"
        rows.append([title, f"{rate:g}{edge}", ", ".join(f"{x:.4f}" for x in losses), f"{mean:.4f}", share])
    return rows


def quality_verdicts(trainings: Trainings) -> None:
    """Print the bars of the quality table."""
    found = {method: trainings.losses(method) for method in RATES}
    mean = {method: statistics.mean(losses) if len(losses) == len(SEEDS) else None for method, losses in found.items()}

    def share(method: str, base: str) -> float | None:
        own, other = mean[method], mean[base]
        return None if own is None or other is None else own / other - 1

    bars = [
        ("int8", "lora", 0.005),
        ("nf4", "nf4-peft", 0.005),
        ("adamw8bit", "adamw", 0.005),
        ("adamw-bf16", "adamw", 0.005),
        ("galore", "adamw", 0.03),
    ]
    for method, base, bar in [*bars, ("galore", "galore-torch", 0.0)]:
        own = share(method, base)
        shown = "-" if own is None else f"{own:+.2%}"
        verdict(f"{TITLES[method]} from {TITLES[base]}: {shown} (bar {bar:+.1%})", None if own is None else own <= bar)
    gap, kept = share("nf4", "lora"), share("nf4-keep", "lora")
    if gap is not None and kept is not None:
        verdict(f"`keep: auto` leaves {kept:+.2%} of {gap:+.2%} above LoRA (bar: half)", kept <= gap / 2)
