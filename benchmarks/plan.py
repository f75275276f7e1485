"""Benchmark `tunewell plan`: predicted beside measured, the border of memory, micro-batch sizes, and the ladder.

    python benchmarks/plan.py predict --minutes 6      memory held and seconds of whole runs, with accelerate's estimate
    python benchmarks/plan.py border                   12 cases at 0.9 to 1.1 of the border of 12, 24 and 40 GB, 1.1B
    python benchmarks/plan.py batch                    the chosen micro-batch against a full sweep: 23M, 1.1B; CPU: 135M
    python benchmarks/plan.py ladder                   every change that `plan` offers for 16 GB, trained for 20 steps
    python benchmarks/plan.py cpu                      six configurations on a CPU: 135M and two tiny models
    python benchmarks/plan.py predict border batch ladder --smoke       do the scripts run? A tiny model on any CPU

Models have random weights, documents are random words. Every plan and every run is a new process. Bars: held memory
within 10% and seconds within 15% of the run after real steps, 20% and 35% without. On a CPU 15% and 20% after real
steps, and no bars without, because other processes slow imports and loading. No case that is said to fit runs out of
memory, the chosen micro-batch is within 3% of the best, every offered change trains.
"""

import argparse
import json
import math
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loads import CASES, Shape
from setting import ROOT, setting, table, tunewell_command

GiB = 2**30
STEP_SECONDS = 55.0
# Memory computed and after real steps, time computed and after real steps.
GPU_BARS, CPU_BARS = (0.2, 0.1, 0.35, 0.15), (math.inf, 0.15, math.inf, 0.2)
SHAPES = {name: case.shape for name, case in CASES.items()} | {"tiny": Shape(128, 384, 4, 4, 2, 1_024, True)}
SHARED = [
    "verdict.questions=8",
    "verdict.max_documents=16",
    "verdict.answer_tokens=64",  # random weights never stop by themselves
    "evaluate.max_documents=16",
    "evaluate.samples=2",
    "evaluate.sample_tokens=16",
]


@dataclass(frozen=True)
class Case:
    """A run: a model, settings, and whether documents are long."""

    name: str
    model: str
    sets: tuple[str, ...]
    is_long: bool = False
    seconds: float = 60.0
    """What it takes, roughly; a case that would end after the deadline is not started."""


_16K = ("train.batch_tokens=16384", "train.micro_batch_tokens=16384")
PREDICTED = [
    Case("1.1b LoRA, uncompiled", "1.1b", (*_16K, "train.compile=off"), seconds=75),
    Case("1.1b LoRA, compiled", "1.1b", (*_16K, "train.compile=on"), seconds=105),
    Case("1.1b NF4, uncompiled", "1.1b", (*_16K, "train.compile=off", "method.quantize=nf4"), seconds=80),
    Case("1.1b full, uncompiled", "1.1b", (*_16K, "train.compile=off", "method.kind=full"), seconds=90),
    Case("135m LoRA, automatic", "135m", ("train.batch_tokens=16384",), seconds=75),
    Case("1.1b LoRA, long documents", "1.1b", (*_16K, "train.compile=off"), is_long=True, seconds=75),
    Case("8b LoRA, uncompiled", "8b", ("train.batch_tokens=8192", "train.compile=off"), seconds=130),
    Case("8b NF4, recomputed", "8b", ("train.batch_tokens=8192", "method.quantize=nf4", "train.recompute=on",
                                      "train.compile=off"), seconds=130),
]  # fmt: skip
SMOKE = [
    Case("smoke LoRA", "smoke", ("train.batch_tokens=2048",), seconds=30),
    Case("smoke full, long documents", "smoke", ("train.batch_tokens=2048", "method.kind=full"), True, 30),
]
ON_CPU = [
    Case("135m LoRA, 1,024 tokens", "135m", ("train.batch_tokens=1024",)),
    Case("135m LoRA, recomputed", "135m", ("train.batch_tokens=1024", "train.recompute=on")),
    Case("135m full", "135m", ("train.batch_tokens=512", "method.kind=full")),
    Case("tiny full", "tiny", ("train.batch_tokens=4096", "method.kind=full")),
    Case("tiny LoRA, long documents", "tiny", ("train.batch_tokens=8192",), True),
    Case("smoke full", "smoke", ("train.batch_tokens=8192", "method.kind=full")),
]


class Work:
    """The folder of a benchmark, and the commands in it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.is_on_cpu = folder.resolve(), not _has_gpu()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.environment = os.environ | {"TUNEWELL_CACHE": str(self.folder / "cache"), "HF_HUB_OFFLINE": "1"}

    def project(self, case: Case) -> Path:
        """Write a model, rows and a config, and return their folder. A model is written once."""
        model = self.folder / f"model-{case.model}"
        if not (model / "config.json").is_file():
            self.run([sys.executable, __file__, "--make", case.model, str(model)], self.folder)
        project = self.folder / "".join(c if c.isalnum() else "-" for c in case.name)
        shutil.rmtree(project, ignore_errors=True)
        project.mkdir()
        write_rows(project / "rows.jsonl", SHAPES[case.model], is_long=case.is_long)
        (project / "tunewell.yaml").write_text(f"model: {model}\ndata:\n  sources: rows.jsonl\n  held_out: 0.01\n")
        return project

    def run(self, line: list[str], folder: Path, *, allowed: tuple[int, ...] = (0,)) -> tuple[str, float]:
        """Run a command; return its output and its seconds. Stop with its errors if it fails."""
        started = time.perf_counter()
        done = subprocess.run(line, cwd=folder, env=self.environment, capture_output=True, text=True)
        if done.returncode not in allowed:
            raise RuntimeError(f"{' '.join(line)} ended with {done.returncode}: {(done.stderr or done.stdout)[-800:]}")
        return done.stdout, time.perf_counter() - started


def write_rows(path: Path, shape: Shape, *, is_long: bool) -> None:
    """Write rows of random letters, one token each: log-normal lengths, mean 185, or up to 6,000 tokens."""
    draw, total, number = random.Random(0), 0, 0
    budget = {"smoke": 60_000, "tiny": 400_000}.get(next(k for k, v in SHAPES.items() if v is shape), 3_000_000)
    with path.open("w", encoding="utf-8") as file:
        while total < budget:
            length = int(
                draw.choice([300, 900, 2_500, 6_000]) if is_long else min(draw.lognormvariate(5.0, 0.66), 1_000)
            )
            length = max(length, 40)
            letters = "".join(draw.choices("abcdefghijklmnopqrstuvwxyz ", k=length))
            cut = int(length * 0.4)
            file.write(json.dumps({"question": f"{number} {letters[:cut]}", "answer": f"{letters[cut:]}."}) + "\n")
            total, number = total + length, number + 1


def make_model(name: str, folder: str) -> None:
    """Write a model with random weights in bf16, and a tokenizer with one token for each byte."""
    import torch
    from gpu_peers import random_model

    sys.path += [str(ROOT / "tests" / "data"), str(ROOT / "tests" / "models")]
    from tiny import write_tiny_model

    write_tiny_model(Path(folder))
    model = random_model(SHAPES[name], "sdpa")
    model.config.max_position_embeddings = 8192
    model.to(torch.bfloat16).save_pretrained(folder)


class GpuMonitor:
    """Polls the used memory of the GPU with nvidia-smi."""

    def __init__(self) -> None:
        self.before, self.most, self._is_over = self._used(), 0, threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def __enter__(self) -> "GpuMonitor":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    @property
    def held_bytes(self) -> int | None:
        return self.most - self.before if self.most else None

    def _poll(self) -> None:
        while not self._is_over.wait(0.2):
            self.most = max(self.most, self._used())

    @staticmethod
    def _used() -> int:
        if shutil.which("nvidia-smi") is None:
            return 0
        line = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        done = subprocess.run(line, capture_output=True, text=True)
        return int(done.stdout.split()[0]) << 20 if done.returncode == 0 and done.stdout.split() else 0


def accelerate_estimate(model: Path) -> float | None:
    """Return the bytes that accelerate's `estimate-memory` gives for training with Adam in bf16."""
    try:
        from accelerate.commands.estimate import estimate_training_usage
    except ImportError:
        return None
    header = model / "model.safetensors"
    size = sum(file.stat().st_size for file in model.glob("*.safetensors")) if header.parent.is_dir() else 0
    usage = estimate_training_usage(2 * size, "bfloat16")  # it counts fp32 weights
    return max((value for value in usage.values() if value > 0), default=None)


def predicted(work: Work, cases: list[Case], deadline: float) -> tuple[list[list[str]], list[str]]:
    """Compare plan and run of each case."""
    rows, verdicts = [], []
    for case in cases:
        if time.monotonic() + case.seconds > deadline:
            rows.append([case.name, "not started: not enough time"])
            continue
        try:
            row, line = _predicted(work, case)
        except (RuntimeError, KeyError, ValueError) as error:
            row, line = [case.name, str(error)[-300:]], f"{case.name}: FAILED"
        rows.append(row)
        verdicts.append(line)
        print(" | ".join(row), flush=True)
    return rows, verdicts


def _predicted(work: Work, case: Case) -> tuple[list[str], str]:
    project, command = work.project(case), tunewell_command()
    sets = [f"--set={text}" for text in (*SHARED, *case.sets)]
    line = [*command, "plan", "--json", *sets]
    first = json.loads(work.run([*line, "--no-measure", "--set=train.max_steps=100"], project, allowed=(0, 2))[0])
    step = first["seconds"]["phases"]["steps"] / 100
    number = max(12, min(1_000, int(STEP_SECONDS / max(step, 1e-6))))
    line.append(f"--set=train.max_steps={number}")
    computed = json.loads(work.run([*line, "--no-measure"], project, allowed=(0, 2))[0])
    measured, plan_seconds = work.run(line, project, allowed=(0, 2))
    measured = json.loads(measured)
    shutil.rmtree(work.folder / "cache" / "base", ignore_errors=True)  # outputs of the base model
    with GpuMonitor() as monitor:
        _, seconds = work.run([*command, "train", *sets, f"--set=train.max_steps={number}"], project, allowed=(0, 3, 4))
    outcome = json.loads((project / "run" / "outcome.json").read_text(encoding="utf-8"))
    events = [json.loads(text) for text in (project / "run" / "events.jsonl").read_text().splitlines()]
    held = outcome["measured"]["peak_bytes"]
    steps = [event for event in events if event["kind"] == "step"]
    details = {
        "case": case.name,
        "steps": number,
        "computed": computed["memory"] | {"seconds": computed["seconds"]},
        "measured": measured["memory"] | {"seconds": measured["seconds"], "basis": measured["basis"]},
        "is_measured": measured["is_measured"],
        "notes": measured["notes"],
        "outcome": outcome["measured"],
        "reserved": max(event["memory_bytes"] or 0 for event in steps),
        "nvidia_smi": monitor.held_bytes,
        "rate": sum(event["tokens"] for event in steps[2:]) / sum(event["seconds"] for event in steps[2:]),
        "wall": seconds,
        "plan_wall": plan_seconds,
    }
    with (work.folder / "predict.jsonl").open("a") as file:
        file.write(json.dumps(details) + "\n")
    memory = [figures["memory"]["peak_bytes"] / held - 1 for figures in (computed, measured)]
    time_off = [figures["seconds"]["expected"] / seconds - 1 for figures in (computed, measured)]
    other = accelerate_estimate(work.folder / f"model-{case.model}")
    bars = CPU_BARS if work.is_on_cpu else GPU_BARS
    is_met = all(abs(off) <= bar for off, bar in zip((*memory, *time_off), bars, strict=True))
    row = [
        case.name,
        f"{held / GiB:.2f}",
        f"{computed['memory']['peak_bytes'] / GiB:.2f} ({memory[0]:+.0%})",
        f"{measured['memory']['peak_bytes'] / GiB:.2f} ({memory[1]:+.0%})",
        f"{other / GiB:.1f} ({other / held - 1:+.0%})" if other else "-",
        f"{seconds:.1f}",
        f"{computed['seconds']['expected']:.1f} ({time_off[0]:+.0%})",
        f"{measured['seconds']['expected']:.1f} ({time_off[1]:+.0%})",
        f"{plan_seconds:.1f}",
    ]
    return row, f"{case.name}: {'reached' if is_met and measured['is_measured'] else 'NOT reached'}"


PREDICT_HEADER = [
    "case",
    "held GiB",
    "computed",
    "after real steps",
    "accelerate",
    "run, s",
    "computed, s",
    "after real steps, s",
    "plan, s",
]


def build_in_process(work: Work, case: Case, *, micro_tokens: int) -> tuple[Any, Any, Any]:
    """Build a run in this process as the probe does; return it, its planner and the corpus."""
    from tunewell.config.load import load_config
    from tunewell.data.corpus.reader import open_corpus
    from tunewell.machine.device import measure_threads, probe_device
    from tunewell.planning.fit import Planner
    from tunewell.planning.forecast import shape_of
    from tunewell.records.plan import Chosen
    from tunewell.runs.config import RunOptions
    from tunewell.runs.folder import open_run_folder
    from tunewell.workflows.prepare import prepare
    from tunewell.workflows.train import Training

    project = work.project(case)
    os.environ["TUNEWELL_CACHE"] = str(work.folder / "cache")
    sets = [*SHARED, *case.sets, f"train.micro_batch_tokens={micro_tokens}", "healing.on=false", f"run={project}/run"]
    loaded = load_config(project / "tunewell.yaml", sets)
    prepare(loaded)
    corpus = open_corpus(loaded.path(loaded.config.corpus))
    training = Training(loaded, RunOptions(), lambda event: None, None)
    folder = open_run_folder(loaded, training.world, is_resuming=False).__enter__()
    planner = Planner(loaded, corpus, probe_device("auto"), shape_of(loaded, corpus), measure_threads)
    plan, order, _ = planner.first
    rate = Chosen[float](value=0.0, because="a benchmark")
    _, run = training.build(folder, corpus, plan.model_copy(update={"learning_rate": rate}), order)
    from tunewell.training.trial import keep_nothing

    keep_nothing(run)
    return run, planner, corpus


def border(work: Work, *, is_smoke: bool) -> tuple[list[list[str]], list[str]]:
    """Limit the card, and take steps at 0.9 to 1.1 of the border. Predictions come from steps of one small size."""
    import torch

    from tunewell.planning.forecast import Measured, predict
    from tunewell.planning.memory import CONTEXT_BYTES
    from tunewell.planning.speed import MeasuredSpeed
    from tunewell.training.trial import measure_size

    has_gpu = torch.cuda.is_available()
    limits = [12e9, 24e9, 40e9] if has_gpu else [0.7e9]
    first, most = (4_096, 49_152) if not is_smoke else (1_024, 2_048)
    case = Case("border", "smoke" if is_smoke else "1.1b", (f"train.batch_tokens={most}", "train.compile=off"))
    run, planner, _ = build_in_process(work, case, micro_tokens=first)
    found = measure_size(run, first, "off", 2)
    context = CONTEXT_BYTES if has_gpu else 0
    known = Measured(
        found["reserved"] + context, found["allocated"] + context, found["micro_tokens"], False, MeasuredSpeed(), ""
    )
    base = planner.outlook.work
    total = torch.cuda.get_device_properties(0).total_memory if has_gpu else 0
    rows, num_wrong, num_refused = [], 0, 0
    for limit in limits:
        for ratio in (0.9, 0.96, 1.04, 1.1):
            tokens = min(most, _tokens_for(base, known, ratio * limit, context))
            work_ = base.with_micro_tokens(tokens)
            device = replace(base.device, memory_bytes=int(limit + context), free_bytes=int(limit + context))
            said = predict(replace(work_, device=device), measured=known).prediction
            if has_gpu:
                torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
            done = measure_size(run, tokens, "off", 2)
            if has_gpu:
                torch.cuda.set_per_process_memory_fraction(1.0)
            ran = done is not None
            is_wrong, is_refused = said.fits and not ran, not said.fits and ran
            num_wrong, num_refused = num_wrong + is_wrong, num_refused + is_refused
            rows.append(
                [
                    f"{limit / 1e9:.0f} GB",
                    f"{ratio:.2f}",
                    f"{tokens:,}",
                    f"{(said.memory.needed_bytes - context) / 1e9:.2f}",
                    f"{done['allocated'] / 1e9:.2f}" if done else "-",
                    "fits" if said.fits else "does not fit",
                    "ran" if ran else "out of memory",
                    "WRONG" if is_wrong else "refused, would fit" if is_refused else "",
                ]
            )
            print(" | ".join(rows[-1]), flush=True)
    met = "reached" if num_wrong == 0 and num_refused <= 1 else "NOT reached"
    return rows, [f"said to fit and out of memory: {num_wrong}; refused but would fit: {num_refused}: {met}"]


def _tokens_for(base: Any, known: Any, wanted: float, context: int) -> int:
    """Return the micro-batch whose predicted need is `wanted` bytes."""
    from tunewell.planning.forecast import predict

    low, high = int(base.lengths.max()), 60_000
    while high - low > 32:
        middle = (low + high) // 2
        need = predict(base.with_micro_tokens(middle), measured=known).prediction.memory.needed_bytes - context
        low, high = (middle, high) if need < wanted else (low, middle)
    return low


BORDER_HEADER = ["limit", "of the border", "tokens at once", "predicted GB", "allocated GB", "said", "did", ""]


def batch(work: Work, *, is_smoke: bool) -> tuple[list[list[str]], list[str]]:
    """Compare the size that `plan` chooses with a longer sweep over all sizes."""
    from tunewell.training.trial import measure_size

    rows, verdicts = [], []
    for model in ("smoke",) if is_smoke else ("135m",) if work.is_on_cpu else ("23m", "1.1b"):
        tokens = 2_048 if is_smoke or work.is_on_cpu else 32_768
        case = Case(f"batch {model}", model, (f"train.batch_tokens={tokens}", "train.compile=off"))
        project = work.project(case)
        line = [*tunewell_command(), "plan", "--json", *(f"--set={text}" for text in (*SHARED, *case.sets))]
        plan = json.loads(work.run([*line, "--set=train.max_steps=20000"], project, allowed=(0, 2))[0])
        chosen = plan["micro_batch_tokens"]
        tried = [entry["tokens"] for entry in plan["micro_batches"]]
        run, _, _ = build_in_process(work, case, micro_tokens=chosen)
        others = [tokens >> shift for shift in range(5)] if not work.is_on_cpu else [tokens, tokens // 2, tokens // 4]
        found = {size: measure_size(run, size, "off", 8) for size in sorted({chosen, *tried, *others})}
        rates = {size: own["rate"] for size, own in found.items() if own}
        losses = [own["loss"] for own in found.values() if own]
        best, constant = max(rates.values()), rates.get(16_384, 0.0)
        share, spread = rates[chosen] / best, (max(losses) - min(losses)) / max(losses)
        is_met = share >= 0.97 and rates[chosen] >= 0.97 * constant and spread <= 2e-2
        shown = ", ".join(f"{size:,}: {rate:,.0f}" for size, rate in rates.items())
        rows.append([model, f"{chosen:,}", f"{share:.1%}", f"{spread:.1e}", shown])
        verdicts.append(f"{model}: {'reached' if is_met else 'NOT reached'}")
        print(" | ".join(rows[-1]), flush=True)
        del run
        _free()
    return rows, verdicts


def _free() -> None:
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


BATCH_HEADER = ["model", "chosen", "of the best", "spread of the first loss", "tokens/s by size"]


def ladder(work: Work, *, is_smoke: bool, gigabytes: float = 16.0) -> tuple[list[list[str]], list[str]]:
    """Write every change that fits 16 GB into a config, and train it for 20 steps with that much memory."""
    model = "smoke" if is_smoke else "1.1b"
    cases = [
        Case("ladder lora", model, ("train.batch_tokens=24576", "train.micro_batch_tokens=24576"), is_long=True),
        Case("ladder full", model, ("train.batch_tokens=8192", "method.kind=full"), is_long=True),
    ]
    jobs: list[tuple[Case, int, dict[str, Any], Path]] = []
    rows: list[list[str]] = []
    gigabytes = 0.62 if is_smoke else gigabytes
    for case in cases:
        project = work.project(case)
        line = [sys.executable, __file__, "--plan-limited", str(gigabytes), *case.sets, "train.compile=off"]
        for number, rung in enumerate(json.loads(work.run(line, project)[0].splitlines()[-1]), 1):
            if rung["fits"]:
                jobs.append((case, number, rung, project))
            else:
                rows.append([case.name, rung["name"], f"{rung['peak_bytes'] / GiB:.1f}", "does not fit", "-"])
    jobs = jobs[:2] if is_smoke else jobs
    # Several at once: each has its own limit, and only whether they run is asked.
    results = _train_limited(work, jobs, gigabytes, at_once=1 if is_smoke else 8)
    for (case, _, rung, _), result in zip(jobs, results, strict=True):
        rows.append([case.name, rung["name"], f"{rung['peak_bytes'] / GiB:.1f}", "fits", result])
        print(" | ".join(rows[-1]), flush=True)
    good = sum(result.startswith("trained") for result in results)
    return rows, [f"{good} of {len(jobs)} offered changes trained: {'reached' if good == len(jobs) else 'NOT reached'}"]


def _train_limited(work: Work, jobs: list[Any], gigabytes: float, *, at_once: int) -> list[str]:
    results: dict[int, str] = {}
    waiting, running = list(enumerate(jobs)), {}
    while waiting or running:
        while waiting and len(running) < at_once:
            index, (case, number, rung, project) = waiting.pop(0)
            sets = [f"{key}={value}" for key, value in rung["set"].items()]
            own = project / f"rung-{number}"
            sets += [*case.sets, "train.compile=off", *sets, "train.max_steps=20", f"run={own}", f"corpus={own}-corpus"]
            sets += ["verdict.after_training=false", "evaluate.every_steps=20", "evaluate.samples=0"]
            line = [sys.executable, __file__, "--train-limited", str(gigabytes), *sets]
            log = (work.folder / f"ladder-{index}.log").open("w")
            running[index] = (subprocess.Popen(line, cwd=project, env=work.environment, stdout=log, stderr=log), own)
        time.sleep(0.2)
        for index, (process, own) in list(running.items()):
            if process.poll() is not None:
                results[index] = _ladder_result(process.returncode, own, work.folder / f"ladder-{index}.log")
                print(jobs[index][0].name, jobs[index][2]["name"], results[index], flush=True)
                del running[index]
    return [results[index] for index in range(len(jobs))]


def _ladder_result(code: int, run: Path, log: Path) -> str:
    outcome = run / "outcome.json"
    if code or not outcome.is_file():
        return f"FAILED ({code}): {log.read_text(errors='replace').strip()[-150:]}"
    found = json.loads(outcome.read_text())
    healed = f", healed: {found['healing'][0]}" if found["healing"] else ""
    return f"trained {found['steps']} steps, {(found['measured']['peak_bytes'] or 0) / GiB:.1f} GiB held{healed}"


LADDER_HEADER = ["case", "change", "predicted GiB", "said", "did"]


def plan_limited(gigabytes: str, *sets: str) -> None:
    """Print the ladder for a card with this much memory."""
    from tunewell.config.load import load_config
    from tunewell.machine.machine import System
    from tunewell.workflows.plan import PlanOptions, plan

    size = int(float(gigabytes) * 1e9)

    class Limited(System):
        def run(self, command: Any, *, seconds: float) -> str | None:
            """Report a smaller card."""
            if "--query-gpu" not in " ".join(command):
                return None
            return f"0, NVIDIA H200, {size >> 20}, {size >> 20}, 9.0, 580.0, 0\n" if _has_gpu() else None

        def read(self, path: str) -> str:
            """Report less main memory, for a CPU."""
            if path == "/proc/meminfo" and not _has_gpu():
                return f"MemTotal: {size >> 10} kB\nMemAvailable: {size >> 10} kB\n"
            return super().read(path)

    result = plan(load_config(Path("tunewell.yaml"), sets), PlanOptions(is_measuring=False), system=Limited())
    print(json.dumps(result.as_json()["ladder"]))


def _has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None


def train_limited(gigabytes: str, *sets: str) -> None:
    """Train in this process with a limit on the memory of the card."""
    import torch

    from tunewell.cli.main import main as run_tunewell

    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, float(gigabytes) * 1e9 / total))
    raise SystemExit(run_tunewell(["train", "--no-supervisor", *(f"--set={text}" for text in sets)]))


def main() -> int:
    """Run the tables and print them."""
    parser = argparse.ArgumentParser(description="Compare predictions with runs.")
    parser.add_argument("tables", nargs="+", choices=["predict", "border", "batch", "ladder", "cpu"])
    parser.add_argument("--minutes", type=float, default=30.0, help="time limit: start no case that would end later")
    parser.add_argument("--cases", nargs="*", default=[], help="only cases whose name has one of these texts")
    parser.add_argument("--work", type=Path, default=Path("demo/plan"), help="folder to work in")
    parser.add_argument("--smoke", action="store_true", help="tiny models, on any machine")
    wanted = parser.parse_args()
    if sys.platform == "linux":  # as the command line does
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    work, deadline = Work(wanted.work), time.monotonic() + wanted.minutes * 60
    print(setting("torch", "transformers", "accelerate", "bitsandbytes"), flush=True)
    for name in wanted.tables:
        print(f"\n## {name}\n", flush=True)
        if name in ("predict", "cpu"):
            cases = SMOKE if wanted.smoke else ON_CPU if name == "cpu" else PREDICTED
            chosen = [case for case in cases if not wanted.cases or any(text in case.name for text in wanted.cases)]
            rows, verdicts = predicted(work, chosen, deadline)
            header = PREDICT_HEADER
        else:
            function, header = {
                "border": (border, BORDER_HEADER),
                "batch": (batch, BATCH_HEADER),
                "ladder": (ladder, LADDER_HEADER),
            }[name]
            rows, verdicts = function(work, is_smoke=wanted.smoke)
        print("\n" + table(header, rows) + "\n\n" + "\n".join(verdicts), flush=True)
    return 0


if __name__ == "__main__":
    hidden = {"--make": make_model, "--plan-limited": plan_limited, "--train-limited": train_limited}
    if sys.argv[1:2] and sys.argv[1] in hidden:
        hidden[sys.argv[1]](*sys.argv[2:])
    else:
        raise SystemExit(main())
