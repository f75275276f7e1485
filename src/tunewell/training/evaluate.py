"""Look at the held-out rows while a run goes on: their loss, and answers to their questions, whatever memory allows."""

import math
import time

import numpy as np

from tunewell.core.progress import Progress
from tunewell.core.units import count
from tunewell.training.events import Evaluated, Sample
from tunewell.training.healer import Healer
from tunewell.training.held_out import HeldOutLoss, held_out_loss
from tunewell.training.memory import OutOfMemory, free_memory, is_out_of_memory
from tunewell.training.run import Run
from tunewell.training.step_log import StepLog

_ANSWER_TOKENS = (8192, 1024, 1)
"""Tokens answered at once, where more did not fit; the last is one question at a time."""


def is_evaluation_due(run: Run) -> bool:
    """Whether there should have been a look where the run is: before the first step, and where it was interrupted."""
    progress, plan = run.progress, run.plan
    is_time = progress.step % plan.evaluate_every.value == 0 or progress.step == plan.num_steps.value
    return progress.last_look < 0 or (is_time and progress.last_look != progress.step)


def evaluate(run: Run, journal: StepLog, healer: Healer) -> bool:
    """Look at the held-out rows; say whether they were never answered better.

    Raises Interrupted where the run is asked to stop meanwhile; then it is as if there had been no look.
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
    if math.isfinite(found.loss):  # what is no number says nothing of a gain, and patience is not for it
        progress.looks_without_gain = 0 if is_best else progress.looks_without_gain + 1
    seconds = time.perf_counter() - started
    event = Evaluated(progress.step, found.loss, found.tokens, found.documents, round(seconds, 6), is_best, samples)
    if run.learner.world.is_first:
        numbers = {name: value for name, value in event.__dict__.items() if name != "samples"}
        run.events.append({"kind": "held_out", **numbers})
    run.listener(event)
    healer.look(progress.step, found.loss, samples)
    run.seconds["look"] += seconds
    journal.restart_clock()
    return is_best and progress.step > 0


def _held_out_loss(run: Run, healer: Healer) -> HeldOutLoss | None:
    """Compute the held-out loss, so many tokens at once as fit; None where not even one document does."""
    fitting = run.remedies.fitting
    budget = fitting.look_limit or fitting.budget(run.plan.micro_batch_tokens.value)
    lengths = np.asarray(run.held_out.index["length"])
    while True:
        try:
            return held_out_loss(run.learner, run.held_out, budget=budget, most=run.config.evaluate.max_documents)
        except OutOfMemory as error:
            run.learner.drop_graphs()
            free_memory(error)
            step = run.progress.step
            if not run.config.healing.on:
                raise
            if budget <= int(lengths.min()):
                words = "the held-out rows do not fit into memory one by one: this look is left out"
                healer.tell_memory(step, "skip", words)
                return None
            budget = fitting.look_limit = max(1, min(budget, int(lengths.sum())) // 2)
            words = f"the held-out rows did not fit into memory: looked at {count(budget)} tokens at once"
            healer.tell_memory(step, "split", words)


def _answers(run: Run, healer: Healer) -> list[Sample]:
    """Answer held-out questions in the first process; none where not even one fits into memory."""
    learner = run.learner
    if not run.config.evaluate.samples:
        return []
    samples = _asked(run, healer) if learner.world.is_first else []
    # Memory was short in that one alone, but all must go on with the same layers: these decide how a step is cut.
    if learner.world.any(not learner.may_use_graphs):
        learner.drop_graphs()
    return samples


def _asked(run: Run, healer: Healer) -> list[Sample]:
    """Answer held-out questions, as many at once as fit, beginning with what fitted last."""
    fitting = run.remedies.fitting
    for batch_tokens in [tokens for tokens in _ANSWER_TOKENS if tokens <= (fitting.answer_limit or tokens)]:
        fitting.answer_limit = batch_tokens
        try:
            return run.ask(run.progress.step, batch_tokens)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or not run.config.healing.on:
                raise
            run.learner.drop_graphs()
            free_memory(error)
            words = "answering held-out questions did not fit into memory: asked again, fewer at once"
            healer.tell_memory(run.progress.step, "split", words)
    healer.tell_memory(run.progress.step, "skip", "not even one held-out question could be answered: no samples")
    return []
