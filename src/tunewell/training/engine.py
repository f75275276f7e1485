"""The loop: steps, looks at held-out rows, checkpoints, until the plan is spent, healing what can be healed."""

import math
import time

import numpy as np

from tunewell.core.units import count
from tunewell.training.batches import lay_out, micro_batches
from tunewell.training.compiling import Compiler
from tunewell.training.healer import Healer
from tunewell.training.held_out import HeldOutLoss, held_out_loss
from tunewell.training.journal import Journal, TakenStep
from tunewell.training.memory_limits import OutOfMemory, free_memory, is_out_of_memory, smaller
from tunewell.training.recovery import Rewind, Stop
from tunewell.training.run import OPTIMIZER, Ending, Progress, Run, resume, state_of
from tunewell.training.schedule import rate_at
from tunewell.training.signals import Signals
from tunewell.training.step import Numbers
from tunewell.training.watching import HeldOutEvent, Sample

__all__ = ["OPTIMIZER", "Ending", "Progress", "Run", "resume", "train"]

EXIT_STOPPED = 4
_ANSWER_TOKENS = (8192, 1024, 1)
"""Tokens answered at once, where more did not fit; the last is one question at a time."""


def train(run: Run) -> Ending:
    """Take the steps of a plan, beginning where the run's progress is, until it is spent or nothing more can help."""
    plan = run.plan
    healer = Healer(run)
    journal = Journal(run, reader=healer.see)
    compiler = Compiler(plan.compile.value, plan.num_steps.value)
    healer.reinstate()
    with Signals() as signals:
        _look_if_due(run, journal, healer)
        while run.progress.step < plan.num_steps.value and not _is_out_of_patience(run):
            try:
                _take(run, journal, healer, compiler=compiler)
            except OutOfMemory as error:
                return Ending("stopped", str(error), EXIT_STOPPED, advice=_smaller_advice(run))
            if compiler.is_due(run.learner.device, step=run.progress.step, seconds=journal.last_seconds):
                journal.flush()
                budget = run.remedies.fitting.budget(plan.micro_batch_tokens.value)
                run.watcher.noted(compiler.run(run.learner, run.order, budget=budget))
            is_last = run.progress.step == plan.num_steps.value
            # Before the look, which may take longer than whoever asked is willing to wait.
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
            is_better = _look(run, journal, healer) if is_looking else False
            is_spent = _is_out_of_patience(run)
            if is_saving or is_spent or is_better:
                run.checkpoints.hold_before(healer.watch.history.low_step)
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


def _look_if_due(run: Run, journal: Journal, healer: Healer) -> None:
    """Look before the first step, and after a resume where the run was stopped before a look that was due."""
    progress, plan = run.progress, run.plan
    is_due = progress.step % plan.evaluate_every.value == 0 or progress.step == plan.num_steps.value
    if progress.last_look < 0 or (is_due and progress.last_look != progress.step):
        if _look(run, journal, healer):
            _save(run, is_better=True, wait=True)
        journal.restart_clock()


def _take(run: Run, journal: Journal, healer: Healer, *, compiler: Compiler) -> None:
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
    planned = compiler.budget(run.learner.device, plan.micro_batch_tokens.value, run.learner.longest)
    numbers, groups, supervised = _fit(run, healer, kept, planned=planned, compiler=compiler, rate=rate, limit=limit)
    tokens = int(run.order.lengths[kept].sum())
    progress.step += 1
    progress.tokens += tokens
    progress.supervised_tokens += supervised
    journal.take(TakenStep(step, groups, numbers, rate, limit, tokens, supervised))


def _fit(
    run: Run, healer: Healer, kept: np.ndarray, *, planned: int, compiler: Compiler, rate: float, limit: float
) -> tuple[Numbers, list[np.ndarray], int]:
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
        batches = [lay_out(run.documents, group) for group in groups]
        try:
            if cut is None and not with_recompute:
                numbers = learner.take_step(batches, number=number, rate=rate, norm_limit=limit)
            else:
                with learner.uncompiled():
                    numbers = learner.take_step(batches, number=number, rate=rate, norm_limit=limit)
            break
        except OutOfMemory as error:
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
        compiler.is_done = False  # for the smaller shape
        learner.uncompile()
    if with_recompute and not fitting.is_recomputing:
        learner.recompute(False)
    return numbers, groups, sum(len(batch.rows) for batch in batches)


def _smaller_advice(run: Run) -> str:
    longest = int(run.order.lengths.max())
    return (
        f"the longest document has {count(longest)} tokens: `packing.long_documents: split` or `drop` with a smaller "
        "`packing.context_length`, a smaller model, or `train.precision: bf16` makes it fit"
    )


def _look(run: Run, journal: Journal, healer: Healer) -> bool:
    """Look at the held-out rows; say whether they were never answered better."""
    progress = run.progress
    if progress.last_look == progress.step or not len(run.held_out):
        return False
    started = time.perf_counter()
    run.watcher.doing("looking at the held-out rows")
    progress.last_look = progress.step
    found = _held_out_loss(run, healer)
    if found is None:
        return False
    is_best = math.isfinite(found.loss) and (progress.best_loss is None or found.loss < progress.best_loss)
    if is_best:
        progress.best_loss, progress.best_step = found.loss, progress.step
    if math.isfinite(found.loss):  # what is no number says nothing of a gain, and patience is not for it
        progress.looks_without_gain = 0 if is_best else progress.looks_without_gain + 1
    samples = _answers(run, healer)
    seconds = time.perf_counter() - started
    event = HeldOutEvent(progress.step, found.loss, found.tokens, found.documents, round(seconds, 6), is_best)
    if run.learner.world.is_first:
        run.events.append({"kind": "held_out", **event.__dict__})
    run.watcher.looked(event, samples)
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
    """Answer held-out questions, as many at once as fit; none where not even one does."""
    if not run.config.evaluate.samples or not run.learner.world.is_first:
        return []
    fitting = run.remedies.fitting
    for batch_tokens in [tokens for tokens in _ANSWER_TOKENS if tokens <= (fitting.answer_limit or tokens)]:
        fitting.answer_limit = batch_tokens
        try:
            return run.ask(run.progress.step, batch_tokens)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or not run.config.healing.on:
                raise
            free_memory(error)
            words = "answering held-out questions did not fit into memory: asked again, fewer at once"
            healer.tell_memory(run.progress.step, "split", words)
    healer.tell_memory(run.progress.step, "skip", "not even one held-out question could be answered: no samples")
    return []


def _is_out_of_patience(run: Run) -> bool:
    patience = run.config.evaluate.patience
    return patience is not None and run.progress.looks_without_gain >= patience


def _save(run: Run, *, is_better: bool, wait: bool) -> None:
    if not run.learner.world.is_first:
        return
    started = time.perf_counter()
    run.watcher.doing("saving a checkpoint")
    run.events.sync()
    run.checkpoints.save(state_of(run), is_best=is_better, wait=wait)
    run.seconds["save"] += time.perf_counter() - started
