"""Benchmark the cost of health checks: the same steps with and without all guards, alternating in one process.

    python benchmarks/guards.py                 1.1B on a GPU, 135M on a CPU
    python benchmarks/guards.py --case 23m

With guards: the device checks that the gradient is finite and below the norm limit, and skips the update otherwise; the
metrics of each step are read one step late and checked by every rule. Without: torch's own clipping and AdamW, and the
metrics are read only for the log. Bar: under 1% of a step.
"""

import argparse
import functools
import math
import statistics
import time
from typing import Any

import torch
from gpu_ours import BASE, plan_of
from gpu_peers import random_model
from loads import ALPHA, CASES, LEARNING_RATE, LONGEST, RANK, draw_documents
from setting import setting, table

from tunewell.config.schema import Config
from tunewell.data.batches import DataOrder, make_batch, micro_batches
from tunewell.methods.lora import Lora
from tunewell.models import attention
from tunewell.training.compile import Compiler
from tunewell.training.health import HealthMonitor, RunContext, StepMetrics
from tunewell.training.optimizers.adamw import AdamW
from tunewell.training.optimizers.base import Update
from tunewell.training.step import TrainableModel


def plain_update(
    optimizer: Any, *, rate: float, max_norm: float | None, loss: Any, scaler: Any, norm_limit: float = math.inf
) -> Any:
    """Clip and step as anyone would."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm or math.inf, foreach=True)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.grad_scale = optimizer.found_inf = None
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return Update(norm, torch.zeros_like(norm))


class Loop:
    """Takes steps with guards or without, and counts the seconds spent in their Python."""

    def __init__(self, learner: TrainableModel, steps: list[list[Any]]) -> None:
        self.learner, self.steps = learner, steps
        self.watch = HealthMonitor(RunContext(vocab_size=learner.model.config.vocab_size, device=learner.device.type))
        self.number = self.place = 0
        self.inside = 0.0
        self._late: tuple[int, Any, float] | None = None

    def window(self, num_steps: int, *, is_guarded: bool, first: int = 0) -> float:
        """Take so many steps from `first` on, the same documents with guards as without; give the seconds of one."""
        self.place = first
        optimizer = self.learner.optimizer
        assert isinstance(optimizer, AdamW)
        plain = functools.partial(plain_update, optimizer.torch_optimizer)
        optimizer.update = functools.partial(AdamW.update, optimizer) if is_guarded else plain
        self._wait()
        began = time.perf_counter()
        for _ in range(num_steps):
            self._step(is_guarded=is_guarded)
        self._wait()
        return (time.perf_counter() - began) / num_steps

    def _step(self, *, is_guarded: bool) -> None:
        limit = math.inf
        if is_guarded:
            began = time.perf_counter()
            limit = self.watch.norm_limit()
            self.inside += time.perf_counter() - began
        batches = self.steps[self.place % len(self.steps)]
        self.place += 1
        numbers = self.learner.take_step(batches, number=self.number, rate=LEARNING_RATE, norm_limit=limit)
        self.number += 1
        late, self._late = self._late, (self.number, numbers, limit)
        if late is not None:
            loss, norm, was_skipped, _ = late[1].read()
            if is_guarded:
                began = time.perf_counter()
                reading = StepMetrics(
                    late[0], loss, norm, LEARNING_RATE, seconds=0.1, tokens=1000, supervised_tokens=600
                )
                found = [f for f in self.watch.observe(reading) if f.severity != "note"]
                self.inside += time.perf_counter() - began
                assert not found and not was_skipped, found

    def _wait(self) -> None:
        if self.learner.device.type == "cuda":
            torch.cuda.synchronize()


def main() -> None:
    """Time windows of both kinds in turns, and print a table."""
    parser = argparse.ArgumentParser()
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--case", default="1.1b" if has_gpu else "135m")
    parser.add_argument("--windows", type=int, default=10, help="number of windows with guards, and as many without")
    parser.add_argument("--steps", type=int, default=10 if has_gpu else 2, help="steps per window")
    options = parser.parse_args()
    case = CASES[options.case]
    attention.register()
    model = random_model(case.shape, attention.FLASH if has_gpu else attention.SDPA)
    config = Config.model_validate({"method": {"rank": RANK, "alpha": ALPHA}})
    plan = plan_of(case, config)
    Lora.apply(model, config.method, seed=0)
    learner = TrainableModel(model, plan.precision.value, LONGEST, settings=config.train)
    documents = draw_documents(case)
    tokens = case.step_tokens if has_gpu else 512
    order = DataOrder(documents.index["length"].astype("int64"), 0, plan.corpus_sha256, tokens)
    compiler = Compiler("on" if has_gpu else "off", 1000)
    if has_gpu:
        compiler.run(learner, order, budget=tokens)
    most = compiler.most_documents(learner)
    steps = [
        [
            make_batch(documents, group)
            for group in micro_batches(order.step(n).documents, order.lengths, tokens, most=most)
        ]
        for n in range(16)
    ]
    loop = Loop(learner, steps)
    for is_guarded in (True, False):
        loop.window(max(6, options.steps // 2) if has_gpu else 1, is_guarded=is_guarded)
    loop.inside = 0.0
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(options.windows):
        for is_guarded in (True, False) if number % 2 == 0 else (False, True):
            first = number * options.steps
            seconds[is_guarded].append(loop.window(options.steps, is_guarded=is_guarded, first=first))
    inside = loop.inside / (options.windows * options.steps)
    print(setting("torch", "transformers", "tunewell"))
    if has_gpu:
        print(torch.cuda.get_device_name())
    on, off = (statistics.median(seconds[kind]) for kind in (True, False))
    ratios = [a / b for a, b in zip(seconds[True], seconds[False], strict=True)]
    rows = [
        ["guards on", f"{on * 1e3:.2f}", f"{min(seconds[True]) * 1e3:.2f} to {max(seconds[True]) * 1e3:.2f}"],
        ["guards off", f"{off * 1e3:.2f}", f"{min(seconds[False]) * 1e3:.2f} to {max(seconds[False]) * 1e3:.2f}"],
    ]
    print(f"\n{options.case}, {BASE}, LoRA rank {RANK}, {tokens:,} tokens per step, {options.windows} windows each.\n")
    print(table(["", "milliseconds per step", "windows"], rows))
    print(f"\nGuards cost {(statistics.median(ratios) - 1) * 100:+.2f}% of a step (median of pairs of windows).")
    print(f"Python inside guards: {inside * 1e6:.0f} microseconds per step, {inside / on * 100:.3f}% of it.")


if __name__ == "__main__":
    main()
