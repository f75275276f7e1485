"""The loop: steps, looks at held-out rows, checkpoints, until the plan is spent or someone asks it to stop."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tunewell.config.schema import Config
from tunewell.hardware.probe import memory_in_use
from tunewell.records.events import EventLog
from tunewell.records.outcome import Status
from tunewell.records.plan import Plan
from tunewell.training.batches import DataOrder, Documents, Step, lay_out, micro_batches
from tunewell.training.checkpoints import Checkpoints, State
from tunewell.training.compiling import Compiler
from tunewell.training.held_out import held_out_loss
from tunewell.training.optim import load_optimizer, optimizer_tensors
from tunewell.training.schedule import rate_at
from tunewell.training.signals import Signals
from tunewell.training.step import Learner, Numbers
from tunewell.training.watching import HeldOutEvent, Sample, StepEvent, Watcher

OPTIMIZER = "optimizer.safetensors"


@dataclass
class Progress:
    """How far a run is; goes into every checkpoint."""

    step: int = 0
    """Finished optimizer steps."""
    best_loss: float | None = None
    best_step: int | None = None
    looks_without_gain: int = 0
    last_look: int = -1
    quarantine: list[int] = field(default_factory=list)
    """Documents that are left out of their steps."""
    tokens: int = 0
    supervised_tokens: int = 0


@dataclass
class Run:
    """Everything a run is made of, put together by whoever starts it."""

    plan: Plan
    config: Config
    learner: Learner
    order: DataOrder
    documents: Documents
    held_out: Documents
    checkpoints: Checkpoints
    events: EventLog
    samples: EventLog
    watcher: Watcher
    trained: Callable[[], tuple[dict[str, dict[str, Any]], dict[str, str]]]
    """Gives the files of the trained model or adapter: tensors by file, and texts."""
    restore: Callable[[dict[str, dict[str, Any]]], None]
    """Puts the tensors of those files back."""
    ask: Callable[[int], list[Sample]] = lambda step: []
    """Answers held-out questions."""
    identity: dict[str, Any] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)
    seconds: dict[str, float] = field(default_factory=lambda: {"train": 0.0, "look": 0.0, "save": 0.0})


@dataclass(frozen=True)
class Ending:
    """Why a run's loop ended."""

    status: Status
    reason: str
    exit_code: int = 0
    signal: str | None = None
    """Which one interrupted it."""


@dataclass
class _Late:
    """A step whose numbers have not been read yet."""

    step: Step
    numbers: Numbers
    rate: float
    tokens: int
    supervised: int


def train(run: Run) -> Ending:
    """Take the steps of a plan, beginning where the run's progress is; raise nothing that a checkpoint cannot mend."""
    plan, progress = run.plan, run.progress
    journal = _Journal(run)
    compiler = Compiler(plan.compile.value, plan.num_steps.value)
    with Signals() as signals:
        _look_if_due(run, journal)
        while progress.step < plan.num_steps.value and not _is_out_of_patience(run):
            budget = compiler.budget(run.learner.device, plan.micro_batch_tokens.value, run.learner.longest)
            _take(run, journal, budget=budget, most=compiler.most_documents(run.learner))
            if compiler.is_due(run.learner.device, step=progress.step, seconds=journal.last_seconds):
                journal.flush()
                run.watcher.noted(compiler.run(run.learner, run.order, budget=plan.micro_batch_tokens.value))
            is_last = progress.step == plan.num_steps.value
            is_better = False
            # Before the look, which may take longer than whoever asked is willing to wait.
            is_asked = run.learner.world.any(signals.asked is not None)
            if not is_asked and (is_last or progress.step % plan.evaluate_every.value == 0):
                journal.flush()
                is_better = _look(run, journal)
            is_spent = _is_out_of_patience(run)
            if is_last or is_asked or is_spent or is_better or progress.step % plan.save_every.value == 0:
                journal.flush()
                _save(run, is_better=is_better, wait=is_last or is_asked or is_spent)
                journal.restart_clock()
            if is_asked:
                reason = f"asked to stop by {signals.asked or 'another process'}"
                return Ending("interrupted", reason, signals.exit_code or 143, signals.asked)
    if run.progress.step < plan.num_steps.value:
        looks = run.config.evaluate.patience
        return Ending("finished", f"the held-out loss was not better in {looks} looks")
    if run.checkpoints.trouble:
        run.watcher.noted(f"the last checkpoint is not on disk: {run.checkpoints.trouble}")
    return Ending("finished", f"all {plan.num_steps.value} steps were taken")


def _look_if_due(run: Run, journal: "_Journal") -> None:
    """Look before the first step, and after a resume where the run was stopped before a look that was due."""
    progress, plan = run.progress, run.plan
    is_due = progress.step % plan.evaluate_every.value == 0 or progress.step == plan.num_steps.value
    if progress.last_look < 0 or (is_due and progress.last_look != progress.step):
        if _look(run, journal):
            _save(run, is_better=True, wait=True)
        journal.restart_clock()


def _take(run: Run, journal: "_Journal", *, budget: int, most: int | None) -> None:
    """Take one step and hand its numbers to the journal, which reads them once the next step is under way."""
    plan, progress = run.plan, run.progress
    step = run.order.step(progress.step)
    kept = step.documents[~np.isin(step.documents, progress.quarantine)] if progress.quarantine else step.documents
    groups = micro_batches(kept, run.order.lengths, budget, most=most)
    batches = [lay_out(run.documents, group) for group in groups]
    rate = rate_at(
        step.number,
        num_steps=plan.num_steps.value,
        warmup_steps=plan.warmup_steps.value,
        peak=plan.learning_rate.value,
        schedule=plan.schedule.value,
        min_share=run.config.train.min_rate_share,
    )
    numbers = run.learner.take_step(batches, number=step.number, rate=rate)
    tokens = sum(batch.num_tokens for batch in batches)
    supervised = sum(len(batch.rows) for batch in batches)
    progress.step += 1
    progress.tokens += tokens
    progress.supervised_tokens += supervised
    journal.take(_Late(step, numbers, rate, tokens, supervised))


class _Journal:
    """Writes one event per step, as soon as the step's numbers can be read without waiting for them."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._late: _Late | None = None
        self._clock = time.perf_counter()
        self.last_seconds = 0.0

    def take(self, late: _Late) -> None:
        """Remember a step, and write the one before it; on a device without a queue, write it at once."""
        before, self._late = self._late, late
        if before is not None:
            self._write(before)
        if late.numbers.arrived is None:
            self.flush()

    def flush(self) -> None:
        """Wait for the last step's numbers and write them."""
        if self._late is not None:
            late, self._late = self._late, None
            self._write(late)

    def restart_clock(self) -> None:
        """Do not count what was done since the last step."""
        self._clock = time.perf_counter()

    def _write(self, late: _Late) -> None:
        loss, norm, was_skipped, scale = late.numbers.read()
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        self.last_seconds = seconds
        self._run.seconds["train"] += seconds
        event = StepEvent(
            step=late.step.number + 1,
            epoch=round(late.step.seen, 6),
            loss=loss,
            grad_norm=norm,
            learning_rate=late.rate,
            tokens=late.tokens,
            supervised_tokens=late.supervised,
            documents=len(late.step.documents),
            seconds=round(seconds, 6),
            memory_bytes=memory_in_use(str(self._run.learner.device)),
            batch_sha256=late.step.sha256,
            was_skipped=was_skipped,
            scale=scale if self._run.learner.scaler.is_on else None,
        )
        if self._run.learner.world.is_first:
            self._run.events.append({"kind": "step", **event.__dict__})
        self._run.watcher.stepped(event)


def _look(run: Run, journal: _Journal) -> bool:
    """Look at the held-out rows; say whether they were never answered better."""
    progress, evaluate = run.progress, run.config.evaluate
    if progress.last_look == progress.step or not len(run.held_out):
        return False
    started = time.perf_counter()
    run.watcher.doing("looking at the held-out rows")
    found = held_out_loss(
        run.learner, run.held_out, budget=run.plan.micro_batch_tokens.value, most=evaluate.max_documents
    )
    is_best = math.isfinite(found.loss) and (progress.best_loss is None or found.loss < progress.best_loss)
    if is_best:
        progress.best_loss, progress.best_step = found.loss, progress.step
    progress.looks_without_gain = 0 if is_best else progress.looks_without_gain + 1
    progress.last_look = progress.step
    samples = run.ask(progress.step) if evaluate.samples and run.learner.world.is_first else []
    seconds = time.perf_counter() - started
    event = HeldOutEvent(progress.step, found.loss, found.tokens, found.documents, round(seconds, 6), is_best)
    if run.learner.world.is_first:
        run.events.append({"kind": "held_out", **event.__dict__})
    run.watcher.looked(event, samples)
    run.seconds["look"] += seconds
    journal.restart_clock()
    return is_best and progress.step > 0


def _is_out_of_patience(run: Run) -> bool:
    patience = run.config.evaluate.patience
    return patience is not None and run.progress.looks_without_gain >= patience


def _save(run: Run, *, is_better: bool, wait: bool) -> None:
    if not run.learner.world.is_first:
        return
    started = time.perf_counter()
    run.watcher.doing("saving a checkpoint")
    run.events.sync()
    tensors, texts = run.trained()
    state = State(
        step=run.progress.step,
        tensors={**tensors, OPTIMIZER: optimizer_tensors(run.learner.optimizer, run.learner.parameters)},
        texts=texts,
        progress={**run.progress.__dict__, "scaler": _scaler_state(run.learner)},
        identity=run.identity,
    )
    run.checkpoints.save(state, is_best=is_better, wait=wait)
    run.seconds["save"] += time.perf_counter() - started


def resume(run: Run, state: State) -> None:
    """Put a run back to where a checkpoint was made: weights, optimizer, scaler, position, log."""
    run.restore(state.tensors)
    load_optimizer(run.learner.optimizer, run.learner.parameters, state.tensors[OPTIMIZER])
    known = {name: value for name, value in state.progress.items() if name in Progress.__dataclass_fields__}
    run.progress = Progress(**known)
    scaler = state.progress.get("scaler") or {}
    if run.learner.scaler.is_on and scaler:
        run.learner.scaler.scale.fill_(scaler["scale"])
        run.learner.scaler.steps_since.fill_(scaler["steps_since"])
    if run.learner.world.is_first:
        run.events.truncate_to(run.progress.step)
        run.samples.truncate_to(run.progress.step)


def _scaler_state(learner: Learner) -> dict[str, float] | None:
    if not learner.scaler.is_on:
        return None
    return {"scale": float(learner.scaler.scale), "steps_since": float(learner.scaler.steps_since)}
