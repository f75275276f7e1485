"""Watch the health of any `transformers.Trainer`, TRL's and Unsloth's among them.

    from tunewell import HealthCallback
    trainer = SFTTrainer(..., callbacks=[HealthCallback()])

A step whose loss or gradients are not finite is not made, and training ends with the layer and the tensor named. What
else is seen, such as a loss that leaves for good, is said on stderr and written beside the checkpoints.
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
from transformers.trainer_callback import TrainerCallback

from tunewell.core.errors import UserError
from tunewell.core.units import count
from tunewell.integrations.hf_callback.logs import HealthLogs
from tunewell.integrations.hf_callback.signals import Rules, Signals, Taken, find_culprit
from tunewell.records.healing import ActionName, HealingEntry
from tunewell.training.health import HealthMonitor
from tunewell.training.metrics import Finding, RunContext, StepMetrics

# Which loss a step had: the model's own, unless the trainer's log shows that it trains on another.

_SHARE, _NATS = 0.05, 1e-3
"""What the two may differ by: a mean over micro-batches is not one over tokens, and logs are rounded."""
_ROUNDING = 1e-4


class TrainedLoss:
    """Holds the losses that a model gives against those that its trainer logs."""

    def __init__(self, *, finished_steps: int) -> None:
        self.is_own = True
        """Whether the model's own loss is the one that is trained on, as far as is known."""
        self.is_sure = False
        """Whether that is known: gradients came back through it, or a log line agreed with it."""
        self._last_logged = finished_steps
        self._since: list[float] = []

    def settle(self, step: int, raw: float | None, logged: float | None) -> float | None:
        """Give the loss of a step: `raw` is the model's own, `logged` the mean of the steps since the last log."""
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


# How a training that another trainer runs is ended: with what was seen, where, and what to do.

_ADVICE = {
    "weight": "load the model or the last good checkpoint again: this weight was broken before the step",
    "output": "look at the rows of this batch; if they are fine, lower `learning_rate`, or leave 16 bits for fp32",
    "gradient": "lower `learning_rate`, or leave 16 bits for fp32",
    "loss-scale-exhausted": "use `bf16=True` in place of `fp16=True`, or fp32 where the device has no bf16",
    "lr-too-high": "go back to a checkpoint from before it and lower `learning_rate`, or warm up for longer",
    "zero-grad-no-learning": "check that what should be trained has `requires_grad`; with gradient checkpointing and "
    "an adapter call `model.enable_input_require_grads()`",
    "loss-zero-collapse": "check that labels are not all -100, and that the model's weights are finite",
}
_OTHERWISE = "start again from the last checkpoint; if it happens at the same step, look at the rows of that batch"


class HealthStop(RuntimeError):
    """Ends a training that cannot go on, and says what was seen, where, and what to do."""

    def __init__(self, what: str, *, step: int, place: str | None, log: Path, fix: str) -> None:
        where = f"\n  where: {place}" if place else ""
        super().__init__(f"step {count(step)}: {what}{where}\n  log:   {log}\n  fix:   {fix}")
        self.step = step
        self.place = place


def advice(name: str, place: str | None = None) -> str:
    """Say what to do about a finding; `place` begins with what went bad: a weight, an output or a gradient."""
    kind = place.partition(" ")[0] if place else ""
    return _ADVICE.get(name) or _ADVICE.get(kind) or _OTHERWISE


_OF_LIKELIHOODS = frozenset({"initial-loss-high", "initial-loss-implausible", "loss-zero-collapse"})
"""What is only true of a model's own loss: that of a preference or a reward may well be 0, and a log rounds."""
_OF_ITS_LOSS = frozenset({"loss-zero-collapse", "lr-too-high", "zero-grad-no-learning"})
"""What is a fault where the model's own loss is trained on: answers that are all rewarded alike have no gradient."""

_EMPTY = (
    "no token of this step is learned (all its labels are -100), so its loss is 0 divided by 0: the update was left "
    "out. Rows may have been cut before their answer"
)


class HealthCallback(TrainerCallback):
    """Looks at every step of a Trainer before its update is made.

    With `action="stop"` a fault raises HealthStop out of `trainer.train()`; with `"warn"` it is said once for each
    kind, and the run goes on without updates that are not finite. `events.jsonl` and `healing.jsonl` are written into
    `folder`, the trainer's `output_dir` if not given. Raises UserError for another action.
    """

    def __init__(self, action: Literal["stop", "warn"] = "stop", *, folder: str | Path | None = None) -> None:
        if action not in ("stop", "warn"):
            raise UserError(f"`{action}` is no action of HealthCallback", fix='use "stop" or "warn"')
        self._action, self._folder = action, folder
        self._is_first = True
        self._signals: Signals | None = None
        self._pending: StepMetrics | None = None
        self._is_seen = False
        self._fault: Finding | None = None
        self._doubtful: Finding | None = None
        self._told: set[str] = set()
        self._filtered: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any = None, **others: Any) -> None:
        """Begin to listen."""
        self._end()
        self._is_first = bool(state.is_world_process_zero)
        folder = Path(self._folder or args.output_dir)
        self._logs = HealthLogs(folder, finished_steps=state.global_step, is_on=self._is_first, say=self._say)
        self._watch = HealthMonitor(_about(args, model))
        self._loss = TrainedLoss(finished_steps=state.global_step)
        self._signals = Signals(model, _rules(args))
        self._pending = self._fault = self._doubtful = None
        self._told.clear()
        self._clock = time.perf_counter()
        # Where the run goes on after a NaN the filter stays: without it the trainer's sum of losses is NaN for good.
        if args.logging_nan_inf_filter and self._action == "stop":
            args.logging_nan_inf_filter, self._filtered = False, args
            self._say("`logging_nan_inf_filter` is off while this trains, so that a NaN is not logged as a loss of 0")

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Forget the step before."""
        if self._signals is not None:
            self._finish()
            self._signals.begin()
            self._clock = time.perf_counter()

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, *, model: Any = None, optimizer: Any = None, **others: Any
    ) -> None:
        """Read the step's numbers, and keep an update that is not finite from being made."""
        if self._signals is None:
            return
        scaler = getattr(optimizer, "scaler", None)
        scale = float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else None
        taken = self._signals.read(scale=scale, is_stopping=self._fault is not None)
        if taken.is_stop_asked:
            self._stop_late(state.global_step)
        reading = StepMetrics(
            step=state.global_step + 1,
            loss=taken.loss,
            grad_norm=taken.grad_norm,
            learning_rate=float(optimizer.param_groups[0]["lr"]) if optimizer is not None else None,
            tokens=taken.tokens,
            supervised_tokens=taken.supervised_tokens,
            scale=scale,
            was_skipped=not (taken.is_loss_finite and taken.are_gradients_finite),
        )
        self._pending, self._is_seen = reading, reading.was_skipped
        if reading.was_skipped:
            self._treat(reading, taken, model)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Take the time, and write the step unless the trainer is about to log it."""
        if self._pending is not None:
            seconds = round(time.perf_counter() - self._clock, 6)
            memory = torch.cuda.max_memory_allocated(args.device) if args.device.type == "cuda" else None
            self._pending = replace(self._pending, seconds=seconds, memory_bytes=memory)
            if not control.should_log:
                self._finish()

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Any = None, **others: Any) -> None:
        """Complete the step's numbers with what the trainer says of it."""
        loss, norm = (_number((logs or {}).get(key)) for key in ("loss", "grad_norm"))
        if self._pending is None or loss is None or self._pending.step != state.global_step:
            return
        if self._pending.grad_norm is None:
            self._pending = replace(self._pending, grad_norm=norm)
        self._finish(logged=loss)

    def on_evaluate(self, args: Any, state: Any, control: Any, *, metrics: Any = None, **others: Any) -> None:
        """Judge a look at held-out rows."""
        if self._signals is None:
            return
        self._finish()
        loss = _number((metrics or {}).get("eval_loss"))
        if loss is not None:
            self._logs.look(state.global_step, loss, seconds=_number(metrics.get("eval_runtime")))
            self._judge(StepMetrics(state.global_step, held_out_loss=loss))

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Write the last step and take the hooks away."""
        self._finish()
        self._end()

    def _finish(self, logged: float | None = None) -> None:
        """Write the step that is pending, and judge it unless that was done before its update."""
        if self._pending is None:
            return
        reading, self._pending = self._pending, None
        was_own = self._loss.is_own
        loss = self._loss.settle(reading.step, reading.loss, logged)
        if was_own and not self._loss.is_own:
            self._watch, self._doubtful = HealthMonitor(self._watch.about), None
            words = "the model's own loss is not the one that is trained on: the logged loss is judged from here on"
            self._write(Finding("another-loss", "note", reading.step, words), "none", words)
        if self._is_seen:
            self._logs.step(reading)
            return
        is_own = reading.loss is not None and self._loss.is_own
        self._loss.is_sure |= is_own and self._signals is not None and self._signals.is_loss_used
        reading = replace(reading, loss=loss)
        self._logs.step(reading)
        self._judge(replace(reading, norm_limit=self._watch.norm_limit()), is_own=is_own)
        if self._loss.is_sure and self._action == "stop":
            self._fault = self._fault or self._doubtful

    def _judge(self, reading: StepMetrics, *, is_own: bool = True) -> None:
        """Say what a reading shows; a fault ends the run before the next update, in every process alike.

        Where it is not known to be the model's own loss that is trained on, some faults are warnings for now.
        """
        for finding in self._watch.see(reading):
            if not is_own and finding.name in _OF_LIKELIHOODS:
                continue
            if finding.name in _OF_ITS_LOSS and not self._loss.is_sure:
                self._doubtful = self._doubtful or finding
                finding = replace(finding, severity="warning")
            is_ending = finding.severity == "fault" and self._action == "stop"
            self._write(finding, "stop" if is_ending else "none", finding.words)
            if is_ending and self._fault is None:
                self._fault = finding

    def _treat(self, reading: StepMetrics, taken: Taken, model: nn.Module) -> None:
        """Leave out an update that is not finite; a lone overflow is left to the scaler, which does the same."""
        worst = next(iter(self._watch.see(reading)), None) or Finding(
            "nothing-to-learn", "warning", reading.step, _EMPTY
        )
        if reading.scale is None or taken.are_gradients_finite:
            # Optimizers pass over what has no gradient. A scaler has seen its infinity and makes no update; without any
            # gradient it would complain.
            for parameter in model.parameters():
                parameter.grad = None
        if worst.severity == "note":
            self._write(worst, "none", worst.words)
            return
        if worst.name == "nothing-to-learn":
            self._write(worst, "skip", worst.words)
            return
        place, remark = None, ""
        if worst.name not in self._told:
            place, remark = self._find(model, is_loss_bad=not taken.is_loss_finite)
        words = f"{worst.words}{f' ({place})' if place else ''}: the update was left out{remark}"
        if self._action == "warn":
            self._write(worst, "skip", words, place=place)
            return
        self._write(worst, "stop", words, place=place)
        fix = advice(worst.name, place)
        self._raise(f"{worst.words}; the update was left out{remark}", step=reading.step, place=place, fix=fix)

    def _find(self, model: nn.Module, *, is_loss_bad: bool) -> tuple[str | None, str]:
        """Look for what went bad; give the place, and what is to be said where it is not known."""
        signals = self._signals
        if signals is None:
            return None, ""
        with signals.paused():
            bad = signals.bad_gradients()
            found = find_culprit(model, tuple(signals.batches), bad_gradients=bad, is_loss_bad=is_loss_bad)
        return found.place, f"; {found.remark}" if found.remark else ""

    def _stop_late(self, finished: int) -> None:
        """Stop for a fault that was found in the step before, or by another process."""
        found = self._fault or Finding("fault", "fault", finished, "another process found a fault")
        fix = advice(found.name)
        self._raise(f"{found.words}; stopped after step {count(finished)}", step=found.step, place=None, fix=fix)

    def _raise(self, what: str, *, step: int, place: str | None, fix: str) -> None:
        log = self._logs.healing_path
        self._finish()
        self._end()
        raise HealthStop(what, step=step, place=place, log=log, fix=fix)

    def _write(self, finding: Finding, action: ActionName, words: str, *, place: str | None = None) -> None:
        """Write a finding down, and say it where it is more than a note: jumps each time, all else once of a kind."""
        self._logs.heal(
            HealingEntry(finding.step, finding.name, finding.severity, action, words, finding.numbers, place=place)
        )
        is_repeated = finding.name in self._told and finding.name != "loss-spike"
        self._told.add(finding.name)
        if finding.severity != "note" and not is_repeated:
            self._say(f"step {count(finding.step)}: {words}")

    def _say(self, words: str) -> None:
        if self._is_first:
            tqdm.write(f"tunewell: {words}", file=sys.stderr)  # above the progress bar, where there is one

    def _end(self) -> None:
        """Take the hooks away, close the files and put the trainer's setting back."""
        if self._signals is not None:
            self._signals.close()
            self._logs.close()
            self._signals = None
        if self._filtered is not None:
            self._filtered.logging_nan_inf_filter, self._filtered = True, None


def _rules(args: Any) -> Rules:
    is_shared = bool(getattr(args, "average_tokens_across_devices", False))
    return Rules(args.device, max_grad_norm=float(args.max_grad_norm or 0.0), is_loss_shared=is_shared)


def _about(args: Any, model: Any) -> RunContext:
    """Say what is known of a run before its first step."""
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
