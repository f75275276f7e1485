"""Observe a trainer of transformers: the metrics of every step before its update, health checks, and checkpoints.

It runs in the engine's process, which may have no tunewell: only the modules that are copied with it.
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from tunewell.training.health import HealthMonitor, RunContext, StepMetrics


class Observer(TrainerCallback):
    """Reports every step to the parent process. A step that is NaN or infinite stops the training before its update.

    Methods of the trainer are wrapped, because callbacks see neither the batches nor the loss of a step.
    """

    def __init__(self, trainer: Any, parent: Any, context: dict[str, Any]) -> None:
        self.parent = parent
        self.monitor = HealthMonitor(RunContext(**context))
        self.is_stopped = False
        self.batches: list[tuple[dict[str, Tensor], Tensor]] = []
        """The micro-batches of this step or evaluation, with their losses."""
        self.norm: Any = 0.0
        self.report: dict[str, Any] = {}
        """The metrics of this step."""
        self.clock = time.perf_counter()
        observe(trainer, "training_step", self.keep_batch)
        observe(trainer, "prediction_step", self.keep_batch)
        observe(trainer.accelerator, "clip_grad_norm_", self.keep_norm)

    def keep_batch(self, result: Any, model: Any, inputs: dict[str, Tensor], *others: Any) -> None:
        """Keep a micro-batch with its loss. An evaluation returns the loss first in a tuple."""
        loss = result[0] if isinstance(result, tuple) else result
        self.batches.append((inputs, loss.detach().float()))

    def keep_norm(self, result: Any, *others: Any) -> None:
        """Keep the norm that the gradients had before they were clipped."""
        self.norm = result

    def seconds(self) -> float:
        """Return the seconds since the last call."""
        before, self.clock = self.clock, time.perf_counter()
        return round(self.clock - before, 6)

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any = None, **others: Any) -> None:
        """Report the size of the model."""
        sizes = [(weight.numel(), weight.requires_grad) for weight in model.parameters()]
        self.monitor.about = replace(self.monitor.about, vocab_size=model.config.get_text_config().vocab_size)
        num_trainable = sum(size for size, trains in sizes if trains)
        self.parent.send("started", {"num_trainable": num_trainable, "num_parameters": sum(size for size, _ in sizes)})
        self.seconds()

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, *, model: Any = None, optimizer: Any = None, **others: Any
    ) -> None:
        """Check the step before its update."""
        loss, norm = float(torch.stack([loss for _, loss in self.batches]).sum()), float(self.norm)
        scaler = getattr(optimizer, "scaler", None)
        is_good = math.isfinite(loss) and math.isfinite(norm)
        metrics = {
            "step": state.global_step + 1,
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": float(optimizer.param_groups[0]["lr"]),
            "tokens": sum(int(inputs["attention_mask"].sum()) for inputs, _ in self.batches),
            "supervised_tokens": sum(num_supervised(inputs) for inputs, _ in self.batches),
            "memory_bytes": torch.cuda.max_memory_reserved() if args.device.type == "cuda" else None,
            "scale": scaler.get_scale() if scaler else None,
            "was_skipped": not is_good,
        }
        self.report = metrics | {"documents": num_rows(self.batches)}
        place = None
        for name, weight in () if is_good else model.named_parameters():
            if place is None and not torch.isfinite(weight).all():
                place = f"weight `{name}`"
            if scaler is None:
                weight.grad = None  # optimizers skip weights without gradients
        self.check(StepMetrics(**metrics), place)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Report the step, and decide whether the training goes on."""
        epoch = round(float(state.epoch or 0.0), 6)
        self.parent.send("step", {**self.report, "epoch": epoch, "seconds": self.seconds()})
        self.batches = []
        is_last = state.global_step >= state.max_steps
        if self.is_stopped or self.parent.is_stopping or is_last:
            control.should_training_stop = True
            control.should_save = not self.is_stopped
            control.should_evaluate = control.should_save and is_last and args.eval_strategy != "no"

    def on_evaluate(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Report an evaluation: the mean over its supervised tokens."""
        losses = [(float(loss), num_supervised(inputs)) for inputs, loss in self.batches]
        tokens = sum(number for _, number in losses)
        loss = sum(loss * number for loss, number in losses if number) / max(1, tokens)
        found = {"step": state.global_step, "loss": loss, "tokens": tokens, "documents": num_rows(self.batches)}
        self.parent.send("evaluated", {**found, "seconds": self.seconds()})
        self.batches = []
        self.check(StepMetrics(state.global_step, held_out_loss=loss), None)

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Let the parent copy the checkpoint before a later one replaces it."""
        self.parent.save(f"{args.output_dir}/checkpoint-{state.global_step}")
        self.seconds()

    def check(self, metrics: StepMetrics, place: str | None) -> None:
        """Report the findings of a step. A fault stops the training."""
        for finding in self.monitor.observe(metrics):
            self.is_stopped |= finding.severity == "fault"
            self.parent.send("found", {**vars(finding), "place": place})


def observe(owner: Any, name: str, keep: Callable[..., None]) -> None:
    """Call `keep` with the result and the arguments of every call of a method."""
    method = getattr(owner, name)

    def call(*values: Any, **named: Any) -> Any:
        result = method(*values, **named)
        keep(result, *values)
        return result

    setattr(owner, name, call)


def num_supervised(inputs: dict[str, Tensor]) -> int:
    """Return the number of supervised tokens. The first token of a row is never predicted."""
    return int((inputs["labels"][:, 1:] != -100).sum())


def num_rows(batches: list[tuple[dict[str, Tensor], Tensor]]) -> int:
    """Return the number of rows."""
    return sum(len(inputs["labels"]) for inputs, _ in batches)
