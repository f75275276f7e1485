"""Evaluate during training: the held-out loss and sample answers, in smaller batches if memory is short."""

import math
import time

import numpy as np

from tunewell.core.progress import Progress
from tunewell.core.units import count
from tunewell.training.events import Evaluated, Sample
from tunewell.training.healing import Healer
from tunewell.training.held_out import HeldOutLoss, held_out_loss
from tunewell.training.memory import OutOfMemory, free_memory, is_out_of_memory
from tunewell.training.run import Run

_ANSWER_TOKENS = (8192, 1024, 1)
"""Tokens answered at once, tried in this order; the last is one question at a time."""


def is_evaluation_due(run: Run) -> bool:
    """Return whether an evaluation is missing: before the first step, or where it was interrupted."""
    progress, plan = run.progress, run.plan
    is_time = progress.step % plan.evaluate_every.value == 0 or progress.step == plan.num_steps.value
    return progress.last_look < 0 or (is_time and progress.last_look != progress.step)


def evaluate(run: Run, healer: Healer) -> bool:
    """Evaluate on the held-out rows; return True if this is the best evaluation of a trained model so far.

    Raises Interrupted if the run is asked to stop meanwhile; the evaluation then does not count.
    """
    progress = run.progress
    if progress.last_look == progress.step or not len(run.held_out):
        return False
    started = time.perf_counter()
    run.listener(Progress("testing on the held-out rows"))
    found = _held_out_loss(run, healer)
    samples = [] if found is None else _answers(run, healer)
    progress.last_look = progress.step
    if found is None:
        return False
    is_best = math.isfinite(found.loss) and (progress.best_loss is None or found.loss < progress.best_loss)
    if is_best:
        progress.best_loss, progress.best_step = found.loss, progress.step
    if math.isfinite(found.loss):  # a NaN does not count for patience
        progress.looks_without_gain = 0 if is_best else progress.looks_without_gain + 1
    seconds = time.perf_counter() - started
    event = Evaluated(progress.step, found.loss, found.tokens, found.documents, round(seconds, 6), is_best, samples)
    if run.learner.world.is_first:
        numbers = {name: value for name, value in event.__dict__.items() if name != "samples"}
        run.events.append({"kind": "held_out", **numbers})
    run.listener(event)
    healer.on_evaluation(progress.step, found.loss, samples)
    run.seconds["look"] += seconds
    return is_best and progress.step > 0


def _held_out_loss(run: Run, healer: Healer) -> HeldOutLoss | None:
    """Return the held-out loss, in batches that fit into memory; None if a single document does not fit."""
    limits = run.healing.limits
    budget = limits.evaluation_tokens or limits.cap(run.plan.micro_batch_tokens.value)
    lengths = np.asarray(run.held_out.index["length"])
    while True:
        try:
            return held_out_loss(run.learner, run.held_out, budget=budget, most=run.config.evaluate.max_documents)
        except OutOfMemory as error:
            run.learner.drop_graphs()
            free_memory(error)
            report = healer.memory_reporter(run.progress.step)
            if not run.config.healing.on:
                raise
            if budget <= int(lengths.min()):
                report("skip", "out of memory: a single held-out row does not fit; this evaluation is skipped")
                return None
            budget = limits.evaluation_tokens = max(1, min(budget, int(lengths.sum())) // 2)
            report("split", f"out of memory: the held-out rows are evaluated with {count(budget)} tokens at once")


def _answers(run: Run, healer: Healer) -> list[Sample]:
    """Answer held-out questions on rank 0; return no samples if not even one fits into memory."""
    learner = run.learner
    if not run.config.evaluate.samples:
        return []
    samples = _answer_in_batches(run, healer) if learner.world.is_first else []
    # Only rank 0 ran out of memory, but all ranks must drop their graphs: these decide how a step is split.
    if learner.world.any(not learner.may_use_graphs):
        learner.drop_graphs()
    return samples


def _answer_in_batches(run: Run, healer: Healer) -> list[Sample]:
    """Answer held-out questions, as many at once as fit, starting with what fitted last."""
    limits, report = run.healing.limits, healer.memory_reporter(run.progress.step)
    for batch_tokens in [tokens for tokens in _ANSWER_TOKENS if tokens <= (limits.answer_tokens or tokens)]:
        limits.answer_tokens = batch_tokens
        try:
            return run.ask(run.progress.step, batch_tokens)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or not run.config.healing.on:
                raise
            run.learner.drop_graphs()
            free_memory(error)
            report("split", "out of memory: the held-out questions are answered in smaller batches")
    report("skip", "out of memory: a single held-out question does not fit; this evaluation has no samples")
    return []
