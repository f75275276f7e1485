"""The loop: steps, looks at held-out rows, checkpoints, until the plan is spent, healing what can be healed."""

import time

import numpy as np

from tunewell.core.progress import Progress
from tunewell.core.units import count
from tunewell.data.batches import make_batch, micro_batches
from tunewell.training.compile import Compiler
from tunewell.training.evaluate import evaluate, is_evaluation_due
from tunewell.training.events import Note
from tunewell.training.healer import Healer
from tunewell.training.memory import OutOfMemory, free_memory, smaller
from tunewell.training.optimizers.base import rate_at
from tunewell.training.recovery import Rewind, Stop
from tunewell.training.run import OPTIMIZER, Ending, Run, RunProgress, resume, state_of
from tunewell.training.signals import Interrupted, Signals
from tunewell.training.step import StepResult
from tunewell.training.step_log import StepLog, StepRecord

__all__ = ["OPTIMIZER", "Ending", "Run", "RunProgress", "resume", "train"]

EXIT_STOPPED = 4


def train(run: Run, *, handle_signals: bool = True) -> Ending:
    """Take the steps of a plan, beginning where the run's progress is, until it is spent or nothing more can help."""
    try:
        return _train(run, Signals(is_installed=handle_signals))
    finally:
        run.learner.uncompile()  # what comes after has other shapes, and needs the memory


def _train(run: Run, handlers: Signals) -> Ending:
    plan = run.plan
    healer = Healer(run)
    journal = StepLog(run, reader=healer.see)
    compiler = Compiler(plan.compile.value, plan.num_steps.value)
    healer.reinstate()
    with handlers as signals:
        if run.learner.world.size == 1:  # several must end a look together
            run.learner.may_go_on = signals.check
        if is_evaluation_due(run):
            is_better, is_asked = _look(run, journal, healer)
            if is_asked:
                return _interrupted(run, signals)
            if is_better:
                _save(run, is_better=True, wait=True)
            journal.restart_clock()
        while run.progress.step < plan.num_steps.value and not _is_out_of_patience(run):
            try:
                _take(run, journal, healer, compiler=compiler)
            except OutOfMemory as error:
                return Ending("stopped", str(error), EXIT_STOPPED, advice=_smaller_advice(run))
            if compiler.is_due(run.learner, step=run.progress.step, seconds=journal.last_seconds):
                journal.flush()
                budget = run.remedies.fitting.budget(plan.micro_batch_tokens.value)
                run.listener(Note(compiler.run(run.learner, run.order, budget=budget)))
            is_last = run.progress.step == plan.num_steps.value
            is_asked = run.learner.world.any(signals.asked is not None)
            is_looking = not is_asked and (is_last or run.progress.step % plan.evaluate_every.value == 0)
            is_saving = is_last or is_asked or run.progress.step % plan.save_every.value == 0
            if is_looking or is_saving:
                journal.flush()  # nothing is judged, and nothing kept, before the last step is known to be well
            match healer.treat():
                case Rewind():
                    journal.forget()
                    journal.restart_clock()
                    continue
                case Stop(finding, advice):
                    return Ending("stopped", finding.words, EXIT_STOPPED, advice=advice)
            is_better = False
            if is_looking:
                is_better, is_asked = _look(run, journal, healer)
            is_spent = _is_out_of_patience(run)
            if is_saving or is_asked or is_spent or is_better:
                run.checkpoints.hold_before(healer.watch.history.low_step)
                _save(run, is_better=is_better, wait=is_last or is_asked or is_spent)
                journal.restart_clock()
            if is_asked:
                return _interrupted(run, signals)
    return _spent(run)


def _interrupted(run: Run, signals: Signals) -> Ending:
    reason = f"asked to stop by {signals.asked or 'another process'}"
    code = run.learner.world.most(signals.exit_code or 0)
    return Ending("interrupted", reason, code, signals.asked, is_resumable=True)


def _spent(run: Run) -> Ending:
    """End a run that has taken its steps: finished only if what it learned is on the disk."""
    reason = f"all {count(run.plan.num_steps.value)} steps were taken"
    if run.progress.step < run.plan.num_steps.value:
        reason = f"the held-out loss was not better in {run.config.evaluate.patience} looks"
    trouble = run.checkpoints.trouble
    if trouble is None:
        return Ending("finished", reason)
    best = run.checkpoints.best()
    if best is not None and best.step == run.progress.best_step:
        run.listener(Note(f"the last checkpoint is not on disk: {trouble}; the best is"))
        return Ending("finished", reason)
    lost = f"{reason}, but what was learned is not on disk: {trouble}"
    advice = "once that is mended, `--resume` takes the steps after the last checkpoint again"
    return Ending("stopped", lost, EXIT_STOPPED, advice=advice, is_resumable=True)


def _look(run: Run, journal: StepLog, healer: Healer) -> tuple[bool, bool]:
    """Look at the held-out rows; say whether they were never answered better, and whether the run was asked to stop."""
    try:
        return evaluate(run, journal, healer), False
    except Interrupted:
        return False, True  # the look is taken when the run goes on


def _take(run: Run, journal: StepLog, healer: Healer, *, compiler: Compiler) -> None:
    """Take one step, in smaller parts where it does not fit, and hand it to the journal, which reads it later."""
    plan, progress = run.plan, run.progress
    step = run.order.step(progress.step)
    left_out = run.remedies.left_out(progress.step)
    kept = step.documents[~np.isin(step.documents, left_out)] if left_out else step.documents
    rate = healer.rate_share * rate_at(
        step.number,
        num_steps=plan.num_steps.value,
        warmup_steps=plan.warmup_steps.value,
        peak=plan.learning_rate.value,
        schedule=plan.schedule.value,
        min_share=run.config.train.min_rate_share,
    )
    limit = healer.norm_limit()
    planned = compiler.budget(run.learner, plan.micro_batch_tokens.value)
    numbers, groups, supervised = _fit(run, healer, kept, planned=planned, compiler=compiler, rate=rate, limit=limit)
    tokens = int(run.order.lengths[kept].sum())
    progress.step += 1
    progress.tokens += tokens
    progress.supervised_tokens += supervised
    journal.take(StepRecord(step, groups, numbers, rate, limit, tokens, supervised))


def _fit(
    run: Run, healer: Healer, kept: np.ndarray, *, planned: int, compiler: Compiler, rate: float, limit: float
) -> tuple[StepResult, list[np.ndarray], int]:
    """Take a step's update, cutting the step smaller until it fits: the same documents, the same gradient.

    Gives its numbers, the documents of each micro-batch, and how many tokens were learned.

    Raises OutOfMemory where a single document does not fit, even with its layers computed again on the way back.
    """
    learner, fitting, number = run.learner, run.remedies.fitting, run.progress.step
    budget = fitting.budget(planned)
    cut: int | None = None
    with_recompute = False
    while True:
        groups = micro_batches(kept, run.order.lengths, budget, most=compiler.most_documents(learner))
        batches = [make_batch(run.documents, group) for group in groups]
        try:
            if cut is None and not with_recompute:
                numbers = learner.take_step(batches, number=number, rate=rate, norm_limit=limit)
            else:
                with learner.uncompiled():
                    numbers = learner.take_step(batches, number=number, rate=rate, norm_limit=limit)
            break
        except OutOfMemory as error:
            learner.drop_graphs()
            free_memory(error)
            if not run.config.healing.on:
                raise
            is_recomputing = with_recompute or fitting.is_recomputing or run.config.train.recompute
            less = smaller(groups, run.order.lengths, is_recomputing=is_recomputing)
            if less is not None:
                budget = cut = less
                words = f"did not fit into memory: taken again, {count(less)} tokens at once"
                healer.tell_memory(number + 1, "split", words)
            elif not is_recomputing:
                with_recompute = True
                learner.recompute(True)
                words = "did not fit into memory: taken again with layers computed twice"
                healer.tell_memory(number + 1, "recompute", words)
            else:
                longest = int(run.order.lengths[kept].max())
                words = f"a document of {count(longest)} tokens does not fit into memory by itself"
                healer.tell_memory(number + 1, "stop", words)
                raise OutOfMemory(words) from error
    if fitting.went(cut, with_recompute=with_recompute):
        words = f"from the next step on {count(fitting.limit or budget)} tokens are computed at once"
        also = ", with layers computed twice" if fitting.is_recomputing else ""
        healer.tell_memory(
            number + 1,
            "recompute" if with_recompute else "split",
            words + also,
            micro_batch_tokens=fitting.limit,
            is_recomputing=fitting.is_recomputing,
        )
        learner.uncompile()  # it is compiled again for the smaller shape
    if with_recompute and not fitting.is_recomputing:
        learner.recompute(False)
    return numbers, groups, sum(len(batch.rows) for batch in batches)


def _smaller_advice(run: Run) -> str:
    longest = int(run.order.lengths.max())
    return (
        f"the longest document has {count(longest)} tokens: `packing.long_documents: split` or `drop` with a smaller "
        "`packing.context_length`, a smaller model, or `train.precision: bf16` makes it fit"
    )


def _is_out_of_patience(run: Run) -> bool:
    patience = run.config.evaluate.patience
    return patience is not None and run.progress.looks_without_gain >= patience


def _save(run: Run, *, is_better: bool, wait: bool) -> None:
    if not run.learner.world.is_first:
        return
    started = time.perf_counter()
    run.listener(Progress("saving a checkpoint"))
    run.events.sync()
    run.checkpoints.save(state_of(run), is_best=is_better, wait=wait)
    run.seconds["save"] += time.perf_counter() - started
