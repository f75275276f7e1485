"""Evaluation during training: loss and answers, in smaller batches after an out-of-memory error.

Checkpoints are compared on the selection slice, by the right answers where the task has a measure, else by the loss.
Without a slice, the held-out rows are only watched: they choose no checkpoint and end no training early.
"""

import itertools
import math
import statistics
import time
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
import torch

from tunewell.core.progress import Progress
from tunewell.core.units import count
from tunewell.data.batches import TokenizedDocuments, make_batch, micro_batches, spread_evenly
from tunewell.inference.degeneration import is_repetitive
from tunewell.machine.out_of_memory import OutOfMemory, free_memory, is_out_of_memory
from tunewell.records.plan import Chosen, write_plan
from tunewell.training.events import Evaluated, Note, Sample
from tunewell.training.healing import Healer
from tunewell.training.run import Run, RunProgress
from tunewell.training.step import TrainableModel

_MIN_JUDGED = 2
"""Minimum number of degenerate sample answers of a broken model."""
_SHORT_RUN_SHARE = 0.25
"""Largest cost of one evaluation, as a share of the training time, at which a short run has one before its end."""
_EVALUATION_SHARE = 0.05
_SAVE_SECONDS = 300.0
_MIN_EVALUATION_SECONDS = 2.0
"""Evaluations that take less than this in a whole run are never reduced."""
_MIN_WRITE_SECONDS = 5.0
"""A checkpoint that is written within this time is never put off."""
_CHANCE = 1.64
"""Standard errors by which a smaller share of right answers must differ: 5% of differences by chance are larger."""
_ANSWER_TOKENS = (8192, 1024, 1)
"""Batch sizes for answers, in tokens, tried in this order. The last one means one question at a time."""


@dataclass(frozen=True)
class HeldOutLoss:
    """The mean loss over the supervised tokens of held-out documents."""

    loss: float
    tokens: int
    documents: int


def is_evaluation_due(run: Run) -> bool:
    """Return whether an evaluation is missing at this step: the initial one, or one that was interrupted."""
    progress, plan = run.progress, run.plan
    is_time = progress.step % plan.evaluate_every.value == 0 or progress.step == plan.num_steps.value
    return progress.last_look < 0 or (is_time and progress.last_look != progress.step)


def limit_evaluations(run: Run) -> None:
    """Evaluate and save less often if evaluations would take more than a twentieth of the training time.

    This is decided once, when the first evaluation after step 0 is due: by then the cost of the one at step 0 and of a
    step are known. The new intervals are recorded in the plan, so that a resumed run uses them too.
    """
    plan, seconds, every = run.plan, run.seconds, run.plan.evaluate_every.value
    is_first = run.progress.step == every and seconds["look"] > 0
    if run.config.evaluate.every_steps != "auto" or not is_first:
        return
    planned = math.ceil(plan.num_steps.value / every)
    # The first steps are slower than the others: they are uncompiled, or wait for the compiler.
    step_seconds = statistics.median(run.step_seconds)
    training = seconds["train"] + (plan.num_steps.value - run.progress.step) * step_seconds
    # One evaluation was at step 0.
    # A short run would show nothing before its end, so its two evaluations may take more.
    fewest = 2 if seconds["look"] <= _SHORT_RUN_SHARE * training else 1
    possible = max(fewest, int(_EVALUATION_SHARE * training / seconds["look"]) - 1)
    is_costly = seconds["look"] * planned > _MIN_EVALUATION_SECONDS
    factor = run.learner.world.max(math.ceil(planned / possible) if is_costly else 1)
    if factor == 1:
        return
    share = max(_EVALUATION_SHARE, seconds["look"] * (possible + 1) / training)
    because = (
        f"an evaluation takes {seconds['look']:.1f} s and a step {step_seconds:.2f} s, so evaluating takes "
        f"at most {share:.0%} of the training time"
    )
    every = min(every * factor, plan.num_steps.value)
    changes = {"evaluate_every": Chosen[int](value=every, because=because)}
    save_every = run.learner.world.max(min(every, int(_SAVE_SECONDS / step_seconds)))
    if run.config.checkpoints.every_steps == "auto" and save_every > plan.save_every.value:
        rarer = "at every evaluation, or about every 5 minutes if that is more often"
        changes["save_every"] = Chosen[int](value=save_every, because=rarer)
    _change_plan(run, changes, f"the model is evaluated every {count(every, 'step')}: {because}")


def limit_saves(run: Run) -> None:
    """Evaluate and save less often if a large checkpoint would delay the next one, or the end of the run.

    Each evaluation may be the best, which is saved, and that save would wait for the previous one. If writing takes
    longer than the rest of the training, the next save is the last one. The new intervals do not include this step.
    They are recorded in the plan, so that a resumed run uses them too.
    """
    plan, step, world = run.plan, run.progress.step, run.learner.world
    last = plan.num_steps.value
    intervals = {"evaluate_every": run.config.evaluate.every_steps, "save_every": run.config.checkpoints.every_steps}
    due = [name for name, key in intervals.items() if key == "auto" and step % getattr(plan, name).value == 0]
    if not due or step >= last:
        return
    remaining = (last - step) * statistics.median(run.step_seconds or [0.0])
    seconds = run.checkpoints.write_seconds
    if world.any(seconds > max(remaining, _MIN_WRITE_SECONDS)):
        values = dict.fromkeys(due, last)
        because = (
            f"at step {count(step)}, training had {remaining:.0f} s left, and writing a checkpoint takes "
            f"{seconds:.0f} s"
        )
    elif world.any(run.checkpoints.is_writing):
        because = f"at step {count(step)}, the previous checkpoint was still being written"
        values = {name: min(_next_multiple(getattr(plan, name).value, step), last) for name in due}
    else:
        return
    shown = " and ".join(f"`{name}` is now {count(value, 'step')}" for name, value in values.items())
    changes = {name: Chosen[int](value=value, because=because) for name, value in values.items()}
    _change_plan(run, changes, f"{shown}: {because}")


def _next_multiple(every: int, step: int) -> int:
    """Return the smallest multiple of an interval that is not due at a step."""
    return next(every * factor for factor in itertools.count(2) if step % (every * factor))


def _change_plan(run: Run, changes: dict[str, Chosen[int]], note: str) -> None:
    run.plan = run.plan.model_copy(update=changes)
    if run.learner.world.is_first:
        write_plan(run.checkpoints.folder.parent, run.plan)
    run.listener(Note(note))


def evaluate(run: Run, healer: Healer) -> bool:
    """Evaluate, and return True if this is the best evaluation of a selection slice so far (step 0 excluded).

    Raises Interrupted if a signal arrives during the evaluation, which is then not recorded.
    """
    progress = run.progress
    if progress.last_look == progress.step or not len(run.held_out):
        return False
    started = time.perf_counter()
    run.listener(Progress("testing on the held-out rows"))
    found = _loss_within_memory(run, healer)
    answers = [] if found is None else _answers(run, healer)
    progress.last_look = progress.step
    if found is None:
        return False
    judged = [sample.right for sample in answers if sample.right is not None]
    is_best = run.is_selecting and _note_best(progress, found.loss, judged)
    samples = [answers[index] for index in spread_evenly(len(answers), run.config.evaluate.samples).tolist()]
    seconds = time.perf_counter() - started
    num_faulty = _num_faulty(samples)
    is_judged = len(samples) >= _MIN_JUDGED
    are_degenerate = healer.monitor.are_most_faulty(num_faulty, len(samples)) if is_judged else None
    event = Evaluated(
        progress.step,
        found.loss,
        found.tokens,
        found.documents,
        seconds=round(seconds, 6),
        is_best=is_best,
        samples=samples,
        are_degenerate=are_degenerate,
        num_faulty=num_faulty,
        right=sum(judged) if judged else None,
        judged=len(judged) or None,
    )
    if run.learner.world.is_first:
        numbers = {name: value for name, value in event.__dict__.items() if name != "samples"}
        run.events.append({"kind": "held_out", **numbers})
    run.listener(event)
    healer.on_evaluation(event)
    run.seconds["look"] += seconds
    return is_best and progress.step > 0


def _note_best(progress: RunProgress, loss: float, judged: list[bool]) -> bool:
    """Return True if this evaluation is the best so far, and note it.

    Without right answers, the lowest loss is best. With them, it is the newest evaluation that has no fewer than the
    most so far, other than by chance: of 20 questions, 1 right at one step and 0 at another say nothing.
    """
    if not math.isfinite(loss):  # it does not count towards `evaluate.patience`
        return False
    share, most = (fmean(judged) if judged else 0.0), progress.most_right or progress.best_share or 0.0
    lowest = math.inf if progress.best_loss is None else progress.best_loss
    is_gain = is_best = (-share, loss) < (-most, lowest)
    if judged and progress.best_loss is not None:
        is_best = share >= most or most - share <= _CHANCE * math.sqrt(_variance(share, most) / len(judged))
    if is_best:
        progress.best_share, progress.best_step = share if judged else None, progress.step
        progress.best_loss = loss
    progress.most_right = max(share, most) if judged or most else None
    progress.looks_without_gain = 0 if is_gain else progress.looks_without_gain + 1
    return is_best


def _variance(share: float, other: float) -> float:
    """Return the variance of the difference of two such shares of one answer, if both differ only by chance."""
    mean = (share + other) / 2
    return 2 * mean * (1 - mean)


def _loss_within_memory(run: Run, healer: Healer) -> HeldOutLoss | None:
    """Return the held-out loss, computed in batches that fit in memory, or None if a single document does not fit."""
    limits = run.healing.limits
    budget = limits.evaluation_tokens or run.micro_batch_tokens
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
    """Answer held-out questions on rank 0, and return them on all ranks; an empty list if not even one fits."""
    learner = run.learner
    if not run.config.evaluate.samples and not run.num_answers:
        return []
    with learner.phases("answers"):
        samples = _answer_in_batches(run, healer) if learner.world.is_first else []
    # Only rank 0 ran out of memory, but all ranks must drop their CUDA graphs, which affect how a step is split.
    if learner.world.any(not learner.may_use_graphs):
        learner.drop_graphs()
    return learner.world.broadcast(samples)


def _answer_in_batches(run: Run, healer: Healer) -> list[Sample]:
    """Answer held-out questions in the largest batches that fit, starting with the batch size that fit last time."""
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


def held_out_loss(learner: TrainableModel, split: TokenizedDocuments, *, budget: int, most: int | None) -> HeldOutLoss:
    """Return the loss of at most `most` documents, spread evenly over a split. The ranks share the work."""
    chosen = spread_evenly(len(split), most)
    lengths = np.asarray(split.index["length"], dtype=np.int64)
    learner.model.eval()
    wide = torch.float32 if learner.device.type == "mps" else torch.float64
    total = torch.zeros((), dtype=wide, device=learner.device)
    tokens = 0
    # Uncompiled: compiling a forward pass without gradients takes longer than it saves in most runs.
    with learner.sharing_out_of_memory(), torch.no_grad(), learner.uncompiled():
        for index, group in enumerate(micro_batches(chosen, lengths, budget)):
            batch = make_batch(split, group)
            tokens += len(batch.rows)
            learner.check_interrupt()
            if index % learner.world.size == learner.world.rank:
                learner.hooks.before_evaluation(batch)
                total += learner.loss_sum(batch).to(wide)
    learner.world.all_reduce([total])
    return HeldOutLoss(float(total) / max(1, tokens), tokens, len(chosen))


def mark_loops(samples: list[Sample]) -> list[Sample]:
    """Mark repetitive answers as loops if, with them, at least half of the samples are degenerate.

    One answer like "fine fine fine" may be right, but half of the held-out questions do not ask for one.
    """
    marked = [
        replace(sample, fault="loops")
        if sample.fault is None and is_repetitive(sample.answer, reference=sample.reference)
        else sample
        for sample in samples
    ]
    return marked if _num_faulty(marked) >= max(_MIN_JUDGED, len(samples) / 2) else samples


def _num_faulty(samples: list[Sample]) -> int:
    return sum(sample.fault is not None for sample in samples)
