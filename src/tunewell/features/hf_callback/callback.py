"""HealthCallback: check every step of a `transformers.Trainer`, including TRL's and Unsloth's trainers.

    from tunewell import HealthCallback
    trainer = SFTTrainer(..., callbacks=[HealthCallback()])

If a loss or gradient is NaN or infinite, the update is skipped, and training stops with the name of the layer and the
tensor. Other findings, such as a diverging loss, are printed to stderr and logged in the output folder.
"""

import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from tqdm import tqdm

from tunewell.core.errors import UserError
from tunewell.core.optional import quiet_bitsandbytes
from tunewell.core.units import count
from tunewell.features.hf_callback.logs import HealthLog
from tunewell.features.hf_callback.signals import SignalRecorder, StepSignals, locate_fault
from tunewell.records.healing import ActionName, HealingEntry
from tunewell.training.health import HealthFinding, HealthMonitor, RunContext, StepMetrics

with quiet_bitsandbytes():
    from transformers.trainer_callback import TrainerCallback

_SHARE, _NATS = 0.05, 1e-3
"""Allowed difference between the model's loss and the logged loss, which averages micro-batches and is rounded."""
_ROUNDING = 1e-4


class TrainedLoss:
    """The loss that is optimised: the model's own, or another loss that the trainer logs (DPO, rewards)."""

    def __init__(self, *, finished_steps: int) -> None:
        self.is_own = True
        """Whether the model's own loss is optimised, as far as is known."""
        self.is_sure = False
        """Whether this is certain, because gradients flowed through the loss or a logged loss matched it."""
        self._last_logged = finished_steps
        self._since: list[float] = []

    def resolve(self, step: int, raw: float | None, logged: float | None) -> float | None:
        """Return the loss of a step from the model's own loss `raw` and the mean `logged` since the last log."""
        if raw is not None:
            self._since.append(raw)
        if logged is None:
            return raw if self.is_own else None
        span, self._last_logged = step - self._last_logged, step
        since, self._since = self._since, []
        if raw is None or not self.is_own:
            return logged
        if not all(map(math.isfinite, since)) or not math.isfinite(logged) or len(since) != span:
            return raw
        mean = sum(since) / span
        difference = abs(mean - logged)
        if difference > _NATS + _SHARE * abs(mean):
            self.is_own = self.is_sure = False
            return logged
        self.is_sure = True
        return logged if span == 1 and difference > _ROUNDING * max(1.0, abs(mean)) else raw


_ADVICE = {
    "weight": "reload the model or the last good checkpoint: this weight was not finite before the step",
    "output": "check the rows of this batch; if they are fine, lower `learning_rate` or train in fp32",
    "gradient": "lower `learning_rate` or train in fp32",
    "loss-scale-exhausted": "use `bf16=True` instead of `fp16=True`, or fp32 if the device has no bf16",
    "lr-too-high": "resume from an earlier checkpoint with a lower `learning_rate` or a longer warmup",
    "zero-grad-no-learning": "check that the trainable parameters have `requires_grad`; with gradient checkpointing "
    "and an adapter call `model.enable_input_require_grads()`",
    "loss-zero-collapse": "check that labels are not all -100, and that the model's weights are finite",
}
_DEFAULT_ADVICE = "resume from the last checkpoint; if it fails at the same step, check the rows of that batch"


class HealthStop(RuntimeError):
    """Raised to stop a training; the message contains the finding, the tensor and the fix."""

    def __init__(self, what: str, *, name: str, step: int, place: str | None, log: Path, fix: str) -> None:
        where = f"\n  where: {place}" if place else ""
        super().__init__(f"step {count(step)}: {what}{where}\n  found: {name}\n  log:   {log}\n  fix:   {fix}")
        self.name = name
        """Id of the failure, as in `tunewell diagnose`; `tunewell explain ID` shows its page."""
        self.step = step
        self.place = place


def advice(name: str, place: str | None = None, *, is_fp32: bool = False) -> str:
    """Return the fix for a finding; `place` starts with the kind of tensor: weight, output or gradient.

    A run in fp32 is not told to train in fp32.
    """
    kind = place.partition(" ")[0] if place else ""
    found = _ADVICE.get(name) or _ADVICE.get(kind) or _DEFAULT_ADVICE
    return found.replace(" or train in fp32", ", lengthen the warmup or lower `max_grad_norm`") if is_fp32 else found


_ONLY_OWN_LOSS = frozenset({"initial-loss-high", "initial-loss-implausible", "loss-zero-collapse"})
"""Findings that apply only to the model's own loss; a preference or reward loss may be 0."""
_FAULT_ONLY_OWN_LOSS = frozenset({"loss-zero-collapse", "lr-too-high", "zero-grad-no-learning"})
"""Findings that are faults only if the model's own loss is optimised; equal rewards have a gradient of 0."""

_NO_SUPERVISED_TOKEN = (
    "this step has no supervised tokens (all labels are -100), so its loss is 0/0 and the update was skipped. "
    "Rows may have been truncated before their answer"
)


class HealthCallback(TrainerCallback):
    """A trainer callback that checks every step before its update.

    With `action="stop"`, a fault raises HealthStop from `trainer.train()`. With `"warn"`, each kind of fault is printed
    once, and training continues; updates that are NaN or infinite are skipped. `events.jsonl` and `healing.jsonl` are
    written to `folder`, by default the trainer's `output_dir`. Raises UserError for any other action.
    """

    def __init__(self, action: Literal["stop", "warn"] = "stop", *, folder: str | Path | None = None) -> None:
        if action not in ("stop", "warn"):
            raise UserError(f"`{action}` is not an action of HealthCallback", fix='use "stop" or "warn"')
        self._action, self._folder = action, folder
        self._is_first = True
        self._signals: SignalRecorder | None = None
        self._pending: StepMetrics | None = None
        self._is_checked = False
        self._fault: HealthFinding | None = None
        self._possible_fault: HealthFinding | None = None
        self._reported: set[str] = set()
        self._filtered_args: Any = None
        self._is_fp32 = False

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any = None, **others: Any) -> None:
        """Open the logs and register the hooks."""
        self._close()
        self._is_first = bool(state.is_world_process_zero)
        folder = Path(self._folder or args.output_dir)
        self._logs = HealthLog(folder, finished_steps=state.global_step, is_on=self._is_first, say=self._print)
        self._monitor = HealthMonitor(_run_context(args, model))
        self._loss = TrainedLoss(finished_steps=state.global_step)
        self._is_fp32 = not (args.fp16 or args.bf16) and getattr(model, "dtype", None) == torch.float32
        self._signals = SignalRecorder(
            model,
            args.device,
            max_grad_norm=float(args.max_grad_norm or 0.0),
            is_loss_shared=bool(getattr(args, "average_tokens_across_devices", False)),
        )
        self._pending = self._fault = self._possible_fault = None
        self._reported.clear()
        self._clock = time.perf_counter()
        # With "warn" the filter stays on: without it, a NaN makes the trainer's running sum of losses NaN permanently.
        if args.logging_nan_inf_filter and self._action == "stop":
            args.logging_nan_inf_filter, self._filtered_args = False, args
            self._print("`logging_nan_inf_filter` is turned off, so that a NaN is not logged as a loss of 0")

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Start a new step."""
        if self._signals is not None:
            self._finish()
            self._signals.begin()
            self._clock = time.perf_counter()

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, *, model: Any = None, optimizer: Any = None, **others: Any
    ) -> None:
        """Read the step's loss and gradients; skip an update that is not finite."""
        if self._signals is None:
            return
        scaler = getattr(optimizer, "scaler", None)
        scale = float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else None
        signals = self._signals.read(scale=scale, is_stopping=self._fault is not None)
        if signals.is_stop_requested:
            finished = state.global_step
            found = self._fault or HealthFinding("fault", "fault", finished, "another rank found a fault")
            self._raise(f"{found.words}; stopped after step {count(finished)}", found)
        metrics = StepMetrics(
            step=state.global_step + 1,
            loss=signals.loss,
            grad_norm=signals.grad_norm,
            learning_rate=float(optimizer.param_groups[0]["lr"]) if optimizer is not None else None,
            tokens=signals.tokens,
            supervised_tokens=signals.supervised_tokens,
            scale=scale,
            was_skipped=not (signals.is_loss_finite and signals.are_gradients_finite),
        )
        self._pending, self._is_checked = metrics, metrics.was_skipped
        if metrics.was_skipped:
            self._handle_bad_step(metrics, signals, model)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Measure the time and memory of the step, and log it unless the trainer is about to log it."""
        if self._pending is not None:
            seconds = round(time.perf_counter() - self._clock, 6)
            memory = torch.cuda.max_memory_allocated(args.device) if args.device.type == "cuda" else None
            self._pending = replace(self._pending, seconds=seconds, memory_bytes=memory)
            if not control.should_log:
                self._finish()

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Any = None, **others: Any) -> None:
        """Add the loss and gradient norm that the trainer logs to the step, and log it."""
        loss, norm = (_number((logs or {}).get(key)) for key in ("loss", "grad_norm"))
        if self._pending is None or loss is None or self._pending.step != state.global_step:
            return
        if self._pending.grad_norm is None:
            self._pending = replace(self._pending, grad_norm=norm)
        self._finish(logged=loss)

    def on_evaluate(self, args: Any, state: Any, control: Any, *, metrics: Any = None, **others: Any) -> None:
        """Log an evaluation and check its loss."""
        if self._signals is None:
            return
        self._finish()
        loss = _number((metrics or {}).get("eval_loss"))
        if loss is not None:
            self._logs.evaluation(state.global_step, loss, seconds=_number(metrics.get("eval_runtime")))
            self._check(StepMetrics(state.global_step, held_out_loss=loss))

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Log the last step and remove the hooks."""
        self._finish()
        self._close()

    def _finish(self, logged: float | None = None) -> None:
        """Log the pending step, and check it unless it was checked before its update."""
        if self._pending is None:
            return
        metrics, self._pending = self._pending, None
        was_own = self._loss.is_own
        loss = self._loss.resolve(metrics.step, metrics.loss, logged)
        if was_own and not self._loss.is_own:
            self._monitor, self._possible_fault = HealthMonitor(self._monitor.about), None
            words = "the trainer computes its own loss, so the logged loss is checked from now on, not the model's"
            self._write(HealthFinding("another-loss", "note", metrics.step, words), "none", words)
        if self._is_checked:
            self._logs.step(metrics)
            return
        is_own = metrics.loss is not None and self._loss.is_own
        self._loss.is_sure |= is_own and self._signals is not None and self._signals.is_loss_used
        metrics = replace(metrics, loss=loss)
        self._logs.step(metrics)
        self._check(replace(metrics, norm_limit=self._monitor.norm_limit()), is_own=is_own)
        if self._loss.is_sure and self._action == "stop":
            self._fault = self._fault or self._possible_fault

    def _check(self, metrics: StepMetrics, *, is_own: bool = True) -> None:
        """Report the findings of a step; after a fault, all ranks stop before the next update."""
        for finding in self._monitor.observe(metrics):
            if not is_own and finding.name in _ONLY_OWN_LOSS:
                continue
            # While it is uncertain whether the model's own loss is optimised, these faults are only warnings.
            if finding.name in _FAULT_ONLY_OWN_LOSS and not self._loss.is_sure:
                self._possible_fault = self._possible_fault or finding
                finding = replace(finding, severity="warning")
            is_stopping = finding.severity == "fault" and self._action == "stop"
            self._write(finding, "stop" if is_stopping else "none", finding.words)
            if is_stopping and self._fault is None:
                self._fault = finding

    def _handle_bad_step(self, metrics: StepMetrics, step: StepSignals, model: nn.Module) -> None:
        """Skip an update that is NaN or infinite; after an fp16 overflow, the gradient scaler skips it."""
        worst = next(iter(self._monitor.observe(metrics)), None) or HealthFinding(
            "nothing-to-learn", "warning", metrics.step, _NO_SUPERVISED_TOKEN
        )
        if metrics.scale is None or step.are_gradients_finite:
            # Optimizers skip parameters without gradients. A scaler that found an infinity skips the update itself, and
            # raises an error if there are no gradients at all.
            for parameter in model.parameters():
                parameter.grad = None
        if worst.severity == "note" or worst.name == "nothing-to-learn":
            self._write(worst, "none" if worst.severity == "note" else "skip", worst.words)
            return
        is_new = worst.name not in self._reported
        place, remark = self._locate(model, is_loss_bad=not step.is_loss_finite) if is_new else (None, "")
        words = f"{worst.words}{f' ({place})' if place else ''}: the update was skipped{remark}"
        self._write(worst, "skip" if self._action == "warn" else "stop", words, place=place)
        if self._action == "stop":
            self._raise(f"{worst.words}; the update was skipped{remark}", worst, place=place)

    def _locate(self, model: nn.Module, *, is_loss_bad: bool) -> tuple[str | None, str]:
        """Return the first tensor that is NaN or infinite, and a remark if it is unknown."""
        signals = self._signals
        if signals is None:
            return None, ""
        with signals.paused():
            bad = signals.bad_gradients()
            found = locate_fault(model, tuple(signals.batches), bad_gradients=bad, is_loss_bad=is_loss_bad)
        return found.place, f"; {found.remark}" if found.remark else ""

    def _raise(self, what: str, finding: HealthFinding, *, place: str | None = None) -> None:
        log, fix = self._logs.healing_path, advice(finding.name, place, is_fp32=self._is_fp32)
        self._finish()
        self._close()
        raise HealthStop(what, name=finding.name, step=finding.step, place=place, log=log, fix=fix)

    def _write(self, finding: HealthFinding, action: ActionName, words: str, *, place: str | None = None) -> None:
        """Log a finding, and print it unless it is a note; each kind is printed once, loss spikes every time."""
        self._logs.heal(
            HealingEntry(finding.step, finding.name, finding.severity, action, words, finding.numbers, place=place)
        )
        is_repeated = finding.name in self._reported and finding.name != "loss-spike"
        self._reported.add(finding.name)
        if finding.severity != "note" and not is_repeated:
            self._print(f"step {count(finding.step)}: {words}")

    def _print(self, words: str) -> None:
        if self._is_first:
            tqdm.write(f"tunewell: {words}", file=sys.stderr)  # above the progress bar, if there is one

    def _close(self) -> None:
        """Remove the hooks, close the logs and restore the trainer's setting."""
        if self._signals is not None:
            self._signals.close()
            self._logs.close()
            self._signals = None
        if self._filtered_args is not None:
            self._filtered_args.logging_nan_inf_filter, self._filtered_args = True, None


def _run_context(args: Any, model: Any) -> RunContext:
    """Return the facts about a run that are known before its first step."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    is_gpu = args.device.type == "cuda"
    return RunContext(
        vocab_size=getattr(text, "vocab_size", None),
        precision="fp16" if args.fp16 else "bf16" if args.bf16 else None,
        device=args.device.type,
        max_grad_norm=float(args.max_grad_norm or 0.0) or None,
        device_bytes=torch.cuda.get_device_properties(args.device).total_memory if is_gpu else None,
        is_from_scratch=not getattr(config, "_name_or_path", ""),
    )


def _number(value: Any) -> float | None:
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return None
