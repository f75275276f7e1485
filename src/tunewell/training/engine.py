"""The training loop: take steps, evaluate, save checkpoints, and recover from bad steps."""

import math
import time

import numpy as np

from tunewell.core.progress import Progress
from tunewell.core.units import count
from tunewell.data.batches import make_batch, micro_batches
from tunewell.data.read_ahead import ReadAhead
from tunewell.machine.out_of_memory import OutOfMemory
from tunewell.training.compile import Compiler, make_compiler
from tunewell.training.evaluate import evaluate, is_evaluation_due, limit_evaluations, limit_saves
from tunewell.training.events import Note, StepTaken
from tunewell.training.healing import Healer
from tunewell.training.memory import OomLadder, peak_memory
from tunewell.training.optimizers.base import rate_at
from tunewell.training.recovery import Rewind, Stop
from tunewell.training.run import Ending, Run, state_of
from tunewell.training.signals import Interrupted, Signals
from tunewell.training.slow_step import SlowStep
from tunewell.training.step import StepRecord

EXIT_STOPPED = 4


def train(run: Run, *, handle_signals: bool = True) -> Ending:
    """Run the training loop from `run.progress` until the planned steps are done or no remedy is left."""
    loop = _Loop(run, Signals(is_installed=handle_signals))
    try:
        return loop.train()
    finally:
        loop.slow_step.stop()
        run.learner.uncompile()  # later code uses different shapes, and needs the memory


class _Loop:
    """The state of the training loop. It logs one event per step."""

    def __init__(self, run: Run, signals: Signals) -> None:
        self.run, self.plan, self.signals = run, run.plan, signals
        self.healer = Healer(run)
        self.late: StepRecord | None = None
        """The last step, if it is not logged yet: on CUDA, its metrics arrive during the next step."""
        self.clock, self.num_computed = time.perf_counter(), run.learner.num_computed
        self.compiler = make_compiler(run)
        self.is_interrupted = False
        self.slow_step = SlowStep(run)

    def train(self) -> Ending:
        run = self.run
        run.learner.phases.start()
        self.healer.restore()
        with self.signals:
            if run.learner.world.size == 1:  # with several ranks, all must finish an evaluation together
                run.learner.check_interrupt = self.signals.check
            if is_evaluation_due(run):
                is_best = self.evaluate()
                if self.is_interrupted:
                    return self.interrupted()
                if is_best:
                    self.save(is_best=True, wait=True)
                if self.healer.stop:
                    return _stopped(self.healer.stop)
                self.restart_clock()
            if self.has_steps_left():
                self.slow_step.start()
            while self.has_steps_left():
                try:
                    self.take_step()
                except OutOfMemory as error:
                    return Ending("stopped", str(error), EXIT_STOPPED, advice=_memory_advice(run))
                with run.learner.phases("health"):
                    if self.compiler and self.compiler.is_due(run.learner, step=run.progress.step):
                        self.compile(self.compiler)
                    self.is_interrupted = run.learner.world.any(self.signals.asked is not None)
                    is_evaluating, is_saving = self.what_is_due()
                    if is_evaluating or is_saving:
                        self.flush()  # check the last step before evaluating or saving it, also when interrupted
                    action = self.healer.apply()
                is_best = action is None and is_evaluating and self.evaluate()
                match action or self.healer.apply():  # the evaluation may have found divergence
                    case Rewind():
                        self.late = None
                        self.restart_clock()
                        continue
                    case Stop() as stop:
                        return _stopped(stop)
                is_over = self.is_interrupted or self.healer.stop is not None or not self.has_steps_left()
                if is_saving or is_best or is_over:
                    run.checkpoints.held_before = self.healer.monitor.low_step
                    self.save(is_best=is_best, wait=is_over)
                    self.restart_clock()
                if self.healer.stop:
                    return _stopped(self.healer.stop)
                if self.is_interrupted:
                    return self.interrupted()
        return _finished(run, self.healer.conclude())

    def has_steps_left(self) -> bool:
        patience = self.run.config.evaluate.patience
        has_patience = patience is None or self.run.progress.looks_without_gain < patience
        return has_patience and self.run.progress.step < self.plan.num_steps.value

    def what_is_due(self) -> tuple[bool, bool]:
        """Return whether to evaluate and whether to save after this step."""
        run, step = self.run, self.run.progress.step
        is_last = step == self.plan.num_steps.value
        if 0 in (step % run.plan.evaluate_every.value, step % run.plan.save_every.value):
            self.flush()  # the last step's time and metrics, which arrive late on CUDA
            limit_evaluations(run)
            limit_saves(run)
        is_evaluating = is_last or step % run.plan.evaluate_every.value == 0
        is_saving = is_last or step % run.plan.save_every.value == 0
        return is_evaluating and not self.is_interrupted, is_saving or self.is_interrupted

    def take_step(self) -> None:
        """Take one step and log it. If it runs out of memory, repeat it with smaller micro-batches."""
        run, plan, healer, phases = self.run, self.plan, self.healer, self.run.learner.phases
        with phases("data"):
            step = run.order.step(run.progress.step)
            left_out = [document for document, since in run.healing.quarantine.items() if step.number >= since]
            documents = step.documents[~np.isin(step.documents, left_out)] if left_out else step.documents
        rate = healer.history.rate_share * rate_at(
            step.number,
            num_steps=plan.num_steps.value,
            warmup_steps=plan.warmup_steps.value,
            peak=plan.learning_rate.value,
            schedule=plan.schedule.value,
            min_share=run.config.train.min_rate_share,
        )
        limit = healer.monitor.norm_limit() if run.config.healing.on else math.inf
        compiler, planned = self.compiler, plan.micro_batch_tokens.value
        planned = compiler.budget(run.learner, planned) if compiler else planned
        ladder = OomLadder(run, run.healing.limits.cap(planned), healer.memory_reporter(step.number + 1))
        while True:
            # One document of a compiled shape is reserved for padding.
            max_documents = run.learner.shape.documents - 1 if run.learner.shape else None
            with phases("data"):
                groups = micro_batches(documents, run.order.lengths, ladder.tokens, most=max_documents)
                batches = [make_batch(run.documents, group) for group in groups]
                if isinstance(run.documents, ReadAhead):
                    run.documents.request(run.order.step(step.number + 1).documents)
            try:
                with ladder.attempt():
                    result = run.learner.take_step(batches, number=step.number, rate=rate, norm_limit=limit)
                break
            except OutOfMemory as error:
                ladder.step_down(groups, error)
        ladder.finish()
        tokens, supervised = (sum(batch.num_tokens for batch in batches), sum(len(batch.rows) for batch in batches))
        run.progress.step += 1
        run.progress.tokens += tokens
        run.progress.supervised_tokens += supervised
        self.flush()  # the previous step
        self.late = StepRecord(step, groups, result, rate, limit, tokens, supervised)
        if result.arrived is None:
            self.flush()

    def flush(self) -> None:
        """Wait for the metrics of the last step, log them and check them."""
        run, learner, record = self.run, self.run.learner, self.late
        if record is None:
            return
        self.late = None
        with learner.phases("wait"):
            loss, norm, was_skipped, scale = record.result.read()
        now = time.perf_counter()
        seconds, self.clock = now - self.clock, now
        run.seconds["train"] += seconds
        run.step_seconds.append(seconds)
        num_before, self.num_computed = self.num_computed, learner.num_computed
        with learner.phases("log"):
            event = StepTaken(
                step=record.step.number + 1,
                epoch=round(record.step.seen, 6),
                loss=loss,
                grad_norm=norm,
                learning_rate=record.rate,
                tokens=record.tokens,
                supervised_tokens=record.supervised_tokens,
                documents=len(record.step.documents),
                seconds=round(seconds, 6),
                memory_bytes=peak_memory(learner.device),
                batch_sha256=record.step.sha256,
                was_skipped=was_skipped,
                scale=scale if learner.scaler.is_on else None,
                micro_batches=len(record.groups),
                computed_tokens=learner.num_computed - num_before,
                phases=learner.phases.take(),
            )
            if learner.world.is_first:
                run.events.append({"kind": "step", **event.__dict__})
            run.listener(event)
        with learner.phases("health"):
            self.slow_step.stop()
            if self.compiler:
                self.compiler.on_step(learner, event)
            self.healer.on_step(record, event)

    def restart_clock(self) -> None:
        """Restart timing, so that the time since the last step is not counted as part of the next one."""
        self.clock = time.perf_counter()

    def compile(self, compiler: Compiler) -> None:
        run = self.run
        self.flush()
        run.listener(Note(compiler.run(run.learner, run.order, budget=run.micro_batch_tokens)))
        self.slow_step.start("compiling")

    def evaluate(self) -> bool:
        """Evaluate, and return True if this is the best evaluation so far."""
        try:
            with self.run.learner.phases("evaluate"):
                is_best = evaluate(self.run, self.healer)
        except Interrupted:
            self.is_interrupted = True  # the evaluation is repeated on resume
            return False
        self.restart_clock()
        return is_best

    def save(self, *, is_best: bool, wait: bool) -> None:
        """Write a checkpoint, on rank 0 only."""
        run = self.run
        if not run.learner.world.is_first:
            return
        started = time.perf_counter()
        run.listener(Progress("saving a checkpoint"))
        with run.learner.phases("save_wait"):  # one checkpoint is written at a time
            run.checkpoints.wait()
        with run.learner.phases("save"):
            run.events.sync()
            run.checkpoints.save(state_of(run), is_best=is_best)
        if wait:
            with run.learner.phases("save_wait"):
                run.checkpoints.wait()
        run.seconds["save"] += time.perf_counter() - started

    def interrupted(self) -> Ending:
        signal = self.signals.asked
        code = self.run.learner.world.max(self.signals.exit_code or 0)
        return Ending("interrupted", f"stopped by {signal or 'another process'}", code, signal, is_resumable=True)


def _stopped(stop: Stop) -> Ending:
    return Ending("stopped", stop.finding.words, EXIT_STOPPED, advice=stop.advice, settings=stop.settings)


def _finished(run: Run, problem: str) -> Ending:
    """Return the ending of the loop: `finished` only if the last or the best checkpoint was saved."""
    reason = f"finished all {count(run.plan.num_steps.value)} steps"
    if run.progress.step < run.plan.num_steps.value:
        patience = run.config.evaluate.patience
        reason = f"stopped early: no better checkpoint in {patience} evaluations (`evaluate.patience`)"
    if problem:
        reason = f"{reason}, but {problem}"
    trouble = run.checkpoints.trouble
    if trouble is None:
        return Ending("finished", reason)
    best = run.checkpoints.best()
    if best is not None and best.step == run.progress.best_step:
        run.listener(Note(f"the last checkpoint was not saved: {trouble}; the best one was"))
        return Ending("finished", reason)
    advice = "Free disk space, then run the same command with `--resume`: it repeats the steps that were not saved."
    lost = f"{reason}, but the last checkpoint was not saved: {trouble}"
    return Ending("stopped", lost, EXIT_STOPPED, advice=advice, is_resumable=True)


def _memory_advice(run: Run) -> str:
    longest = int(run.order.lengths.max())
    return (
        f"The longest document has {count(longest)} tokens. Set `packing.long_documents: split` or `drop` with a "
        "smaller `packing.context_length`, use a smaller model, or set `train.precision: bf16`."
    )
