"""Train one case with tunewell's engine; `gpu.py` starts this in a fresh process.

    python benchmarks/gpu_ours.py 1.1b ours-compiled

The loop is the one of `tunewell train`, with fp32 masters, clipping, an event for every step on disk, and a checkpoint
in every window. Only the weights are drawn instead of read, and the documents are in memory.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from clock import Clock, Marks
from gpu_peers import LOG_STEPS, random_model
from loads import (
    ALPHA,
    CASES,
    LONGEST,
    RANK,
    VARIANTS,
    Case,
    Documents,
    Variant,
    draw_documents,
)

from tunewell.config.extensions import METHODS
from tunewell.config.schema import Config
from tunewell.data.batches import DataOrder
from tunewell.models import attention
from tunewell.records.events import EventLog
from tunewell.records.healing import HEALING
from tunewell.records.plan import Plan, QuantizedBase
from tunewell.training.checkpoints import Checkpoints, State
from tunewell.training.engine import train as take_steps
from tunewell.training.leak_probe import probe_leaks
from tunewell.training.recovery import HealingState
from tunewell.training.run import Run
from tunewell.training.step import TrainableModel

CONTENDERS = {"ours-eager": "off", "ours-compiled": "on", "ours-auto": "auto"}
MATMUL_SIZE = 8192
BASE = "drawn at random"


class NoDocuments:
    """Nothing is held out."""

    index: dict[str, Any] = {}  # noqa: RUF012

    def __len__(self) -> int:
        return 0

    def arrays(self, index: int) -> Any:
        """Raise IndexError: there are no documents."""
        raise IndexError(index)


class NoCheckpoints(Checkpoints):
    """Writes nothing: some disks are smaller than the states of a large model."""

    def save(self, state: State, *, is_best: bool = False, wait: bool = False) -> None:
        """Do not save the state."""


class Stopwatch:
    """Adds up the time that calls of a function take on the GPU, without waiting for it."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Any, Any]] = []
        self._seconds = 0.0

    def around(self, call: Any) -> Any:
        """Return the function with a clock around it."""

        def timed(*args: Any, **options: Any) -> Any:
            if not torch.cuda.is_available():
                begun = time.perf_counter()
                result = call(*args, **options)
                self._seconds += time.perf_counter() - begun
                return result
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            result = call(*args, **options)
            end.record()
            self._pairs.append((begin, end))
            return result

        return timed

    def read(self) -> float:
        """Return the seconds since the last reading; the GPU must be done."""
        if self._pairs:
            torch.cuda.synchronize()
        seconds = self._seconds + sum(begin.elapsed_time(end) for begin, end in self._pairs) / 1000
        self._pairs, self._seconds = [], 0.0
        return seconds


def plan_of(case: Case, config: Config) -> Plan:
    """Write the plan that `tunewell train` would make of these settings."""
    has_gpu = torch.cuda.is_available()
    chosen = {
        "device": "cuda:0" if has_gpu else "cpu",
        "precision": "bf16" if has_gpu else "fp32",
        "attention": "flash" if has_gpu else "sdpa",
        "threads": torch.get_num_threads(),
        "method": config.method.kind,
        "learning_rate": config.train.learning_rate,
        "schedule": "constant",
        "warmup_steps": 0,
        # One more than is timed: the last step is told of at once, the others when the next is under way.
        "num_steps": case.num_steps + 1,
        "epochs": 1.0,
        "batch_tokens": case.step_tokens,
        "batch_documents": None,
        "micro_batch_tokens": case.step_tokens,
        "compile": config.train.compile,
        "evaluate_every": case.num_steps + 1,
        "save_every": case.window_steps,
    }
    known = {"made_by": "benchmarks/gpu.py", "model": BASE, "corpus": "in memory", "corpus_sha256": "0" * 64}
    return Plan.model_validate(
        known
        | {"tokenizer_sha256": "0" * 64, "template_sha256s": [], "seed": 0, "config": config.model_dump(mode="json")}
        | {name: {"value": value, "because": "the benchmark says so"} for name, value in chosen.items()}
    )


def put_together(
    case: Case, variant: Variant, documents: Documents, *, model: Any, compiling: str, marks: Marks, folder: Path
) -> Run:
    """Lay out a run as `tunewell train` does."""
    config = Config.model_validate(
        {
            "method": {"kind": variant.kind, "rank": RANK, "alpha": ALPHA, "quantize": variant.quantize},
            "train": {
                "learning_rate": variant.learning_rate,
                "schedule": "constant",
                "compile": compiling,
                "optimizer": variant.optimizer,
                # A rank that leaves something to project in the smallest case.
                "galore_rank": min(128, case.shape.hidden // 4),
                "recompute": variant.recompute,
            },
            "evaluate": {"samples": 0},
        }
    )
    plan = plan_of(case, config)
    method = METHODS.load(variant.kind).apply(model, config.method, seed=0)
    learner = TrainableModel(model, plan.precision.value, LONGEST, settings=config.train)
    if variant.recompute != "off":
        learner.recompute(config.train.recompute)
    return Run(
        plan=plan,
        config=config,
        learner=learner,
        order=DataOrder(documents.index["length"].astype("int64"), 0, plan.corpus_sha256, case.step_tokens),
        documents=documents,
        held_out=NoDocuments(),
        checkpoints=(Checkpoints if variant.saves else NoCheckpoints)(
            folder / "checkpoints", keep=2, on_trouble=marks.notes.append
        ),
        events=EventLog(folder / "events.jsonl"),
        samples=EventLog(folder / "samples.jsonl"),
        healing=HealingState(folder / HEALING),
        listener=marks,
        method=method,
        load_weights=dict,
    )


def quantize(model: Any, kind: str) -> None:
    """Quantise the drawn weights, and forget the memory that they took in 16 bits."""
    from tunewell.models.quantized import quantize_model

    quantize_model(model, QuantizedBase.model_validate({"kind": kind}), model.device)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def ours(case: Case, variant: Variant, compiling: str, started_at: float) -> None:
    """Train the case and report; the clock is read when the engine has read a step's numbers."""
    attention.register()
    # The engine tells of a step when its numbers have arrived, so it is done by then.
    clock = Clock(case.marks, started_at, is_waiting=False)
    marks = Marks(clock)
    documents = draw_documents(case)
    kernel = attention.FLASH if torch.cuda.is_available() else attention.SDPA
    model = random_model(case.shape, kernel, is_fp32=variant.kind == "full")
    refresh, refreshes = Stopwatch(), list[float]()
    if variant.optimizer == "galore":
        marks.at_mark = lambda: refreshes.append(refresh.read())
    if variant.quantize != "none":
        quantize(model, variant.quantize)
    with tempfile.TemporaryDirectory() as name:
        clock.call()
        run = put_together(case, variant, documents, model=model, compiling=compiling, marks=marks, folder=Path(name))
        probe_leaks(run.learner, documents)
        optimizer: Any = run.learner.optimizer
        if variant.optimizer == "galore":
            for part in ("_find_basis", "_replace_basis"):
                setattr(optimizer, part, refresh.around(getattr(optimizer, part)))
        ending = take_steps(run)
        states = sum(tensor.nbytes for tensor in optimizer.state_tensors().values())
        (Path(name) / "checkpoints").mkdir(exist_ok=True)
        saved = sorted(path.name for path in (Path(name) / "checkpoints").iterdir())
        run.events.close()
        run.samples.close()
    peak = clock.peak()  # before the product below takes memory of its own
    clock.report(
        **peak,
        losses=as_logged(marks.losses),
        grad_norms=marks.grad_norms,
        notes=marks.notes,
        ending=ending.reason,
        checkpoints=saved,
        seconds=run.seconds,
        state_bytes=states,
        # Seconds of each window in which GaLore looks for new bases and rotates the moments into them.
        refresh_seconds=refreshes[1:],
        matmul_flops=matmul_rate(),
    )


def as_logged(losses: list[float]) -> list[tuple[int, float]]:
    """Return the first loss, then means over as many steps as TRL logs."""
    ends = range(LOG_STEPS, len(losses) + 1, LOG_STEPS)
    return [(1, losses[0])] + [(end, statistics.mean(losses[max(1, end - LOG_STEPS) : end])) for end in ends]


def matmul_rate() -> float | None:
    """Measure the rate of one large bf16 product, the most that this GPU can be asked for."""
    if not torch.cuda.is_available():
        return None
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(5):
        a @ b
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(20):
        a @ b
    torch.cuda.synchronize()
    return 20 * 2.0 * MATMUL_SIZE**3 / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train one case with tunewell and print what was measured.")
    parser.add_argument("case", choices=CASES)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("--variant", choices=VARIANTS, default="lora")
    parser.add_argument("--started-at", type=float, default=time.time())
    wanted = parser.parse_args()
    variant = VARIANTS[wanted.variant]
    ours(variant.case(wanted.case), variant, CONTENDERS[wanted.contender], wanted.started_at)


if __name__ == "__main__":
    main()
