"""Observe a trainer of transformers: the metrics of every step before its update, health checks, and checkpoints.

It runs in the engine's process, which may have no tunewell: only the modules that are copied with it.
"""

import hashlib
import math
import time
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from tunewell.training.finite_checks import checked_outputs, is_finite
from tunewell.training.health import HealthFinding, HealthMonitor, RunContext, StepMetrics

_NOT_REPORTED = ("seconds", "norm_limit", "held_out_loss")


class Observer(TrainerCallback):
    """Reports every step to the parent process. A step that is NaN or infinite stops the training before its update.

    Methods of the trainer are wrapped, because callbacks see neither the batches nor the loss of a step.
    """

    def __init__(self, trainer: Any, parent: Any, context: dict[str, Any]) -> None:
        self.trainer, self.parent = trainer, parent
        self.monitor = HealthMonitor(RunContext(**context))
        self.is_stopped = False
        self.batches: list[dict[str, Tensor]] = []
        self.losses: list[Tensor] = []
        self.norm: Any = 0.0
        self.held_out: list[tuple[float, int, int]] = []
        """Loss, supervised tokens and documents of the batches of an evaluation."""
        self.report: dict[str, Any] = {}
        """The metrics of this step."""
        self.clock = time.perf_counter()
        self._training_step, trainer.training_step = trainer.training_step, self.training_step
        self._prediction_step, trainer.prediction_step = trainer.prediction_step, self.prediction_step
        self._clip, trainer.accelerator.clip_grad_norm_ = trainer.accelerator.clip_grad_norm_, self.clip

    def training_step(self, model: Any, inputs: Any, *others: Any, **named: Any) -> Tensor:
        """Take the forward and backward pass of a micro-batch, and keep its rows and its loss."""
        self.batches.append({name: inputs[name] for name in ("input_ids", "attention_mask", "labels")})
        loss = self._training_step(model, inputs, *others, **named)
        self.losses.append(loss.detach().float())
        return loss

    def clip(self, *values: Any, **named: Any) -> Any:
        """Clip the gradients, and keep the norm that they had."""
        self.norm = self._clip(*values, **named)
        return self.norm

    def prediction_step(self, model: Any, inputs: Any, *others: Any, **named: Any) -> Any:
        """Evaluate a batch, and keep its loss with the number of tokens that it is the mean of."""
        supervised, rows = num_supervised(inputs["labels"]), len(inputs["labels"])
        result = self._prediction_step(model, inputs, *others, **named)
        self.held_out.append((float(result[0]), supervised, rows))
        return result

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any = None, **others: Any) -> None:
        """Report the size of the model."""
        sizes = [(weight.numel(), weight.requires_grad) for weight in model.parameters()]
        vocabulary = model.config.get_text_config().vocab_size
        self.monitor.about = RunContext(**{**vars(self.monitor.about), "vocab_size": vocabulary})
        started = {"num_parameters": sum(size for size, _ in sizes), "num_embeddings": vocabulary}
        self.parent.send("started", {**started, "num_trainable": sum(size for size, trains in sizes if trains)})
        self.clock = time.perf_counter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Start a new step."""
        self.batches, self.losses, self.norm = [], [], 0.0

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, *, model: Any = None, optimizer: Any = None, **others: Any
    ) -> None:
        """Check the step before its update."""
        loss, norm = float(torch.stack(self.losses).sum()), float(self.norm)
        scaler = getattr(optimizer, "scaler", None)
        is_good = math.isfinite(loss) and math.isfinite(norm)
        step = state.global_step + 1
        supervised = sum(num_supervised(batch["labels"]) for batch in self.batches)
        metrics = StepMetrics(
            step,
            loss,
            norm,
            learning_rate=float(optimizer.param_groups[0]["lr"]),
            tokens=sum(int(batch["attention_mask"].sum()) for batch in self.batches),
            supervised_tokens=supervised,
            memory_bytes=peak_memory(args.device),
            scale=float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else None,
            was_skipped=not is_good,
        )
        digest = hashlib.sha256(b"".join(batch["input_ids"].cpu().numpy().tobytes() for batch in self.batches))
        self.report = {
            **{name: value for name, value in vars(metrics).items() if name not in _NOT_REPORTED},
            "documents": sum(len(batch["labels"]) for batch in self.batches),
            "batch_sha256": digest.hexdigest()[:16],
            "micro_batches": len(self.batches),
        }
        place = None if is_good else self.locate(model)
        if not is_good and scaler is None:
            for weight in model.parameters():
                weight.grad = None  # optimizers skip weights without gradients
        self.check(metrics, place)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Report the step, and decide whether the training goes on."""
        now = time.perf_counter()
        epoch, seconds = round(float(state.epoch or 0.0), 6), round(now - self.clock, 6)
        self.clock = now
        self.parent.send("step", {**self.report, "epoch": epoch, "seconds": seconds})
        is_last = state.global_step >= state.max_steps
        if self.is_stopped:
            control.should_training_stop, control.should_save, control.should_evaluate = True, False, False
        elif self.parent.is_stopping or is_last:
            control.should_training_stop = control.should_save = True
            control.should_evaluate = is_last and args.eval_strategy != "no"

    def on_evaluate(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Report an evaluation: the mean over its supervised tokens."""
        batches, self.held_out = self.held_out, []
        tokens = sum(supervised for _, supervised, _ in batches)
        loss = sum(loss * supervised for loss, supervised, _ in batches if supervised) / max(1, tokens)
        seconds, self.clock = time.perf_counter() - self.clock, time.perf_counter()
        found = {"loss": loss, "tokens": tokens, "documents": sum(rows for _, _, rows in batches)}
        self.parent.send("evaluated", {"step": state.global_step, **found, "seconds": round(seconds, 6)})
        self.check(StepMetrics(state.global_step, held_out_loss=loss), None)

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Let the parent copy the checkpoint before a later one replaces it."""
        self.parent.save(f"{args.output_dir}/checkpoint-{state.global_step}")
        self.clock = time.perf_counter()

    def check(self, metrics: StepMetrics, place: str | None) -> None:
        """Report the findings of a step. A fault stops the training."""
        for finding in self.monitor.observe(metrics):
            is_fault = finding.severity == "fault"
            self.is_stopped |= is_fault
            self.parent.send("found", described(finding, place, is_fault=is_fault))

    def locate(self, model: Any) -> str | None:
        """Return the first weight that is NaN or infinite, or the first module whose output is."""
        for name, weight in model.named_parameters():
            if not is_finite(weight.detach()):
                return f"weight `{name}`"
        found: list[str] = []
        with checked_outputs(model, found), torch.no_grad(), torch.autocast(**self.autocast()):
            for batch in self.batches:
                model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
                if found:
                    break
        return found[0] if found else None

    def autocast(self) -> dict[str, Any]:
        """Return the precision in which the trainer computes."""
        args = self.trainer.args
        dtype = torch.float16 if args.fp16 else torch.bfloat16
        return {"device_type": args.device.type, "dtype": dtype, "enabled": bool(args.fp16 or args.bf16)}


def described(finding: HealthFinding, place: str | None, *, is_fault: bool) -> dict[str, Any]:
    """Return a finding with what was done as an entry of `healing.jsonl`."""
    words = f"{finding.words}{f' ({place})' if place else ''}{': the run stops' if is_fault else ''}"
    kept = {"step": finding.step, "name": finding.name, "severity": finding.severity, "numbers": finding.numbers}
    return {**kept, "action": "stop" if is_fault else "none", "words": words, "place": place}


def num_supervised(labels: Tensor) -> int:
    """Return the number of supervised tokens. The first token of a row is never predicted."""
    return int((labels[:, 1:] != -100).sum())


def peak_memory(device: torch.device) -> int | None:
    """Return the peak memory of the GPU or, on the CPU, of this process; None if the system does not report it."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
