"""`tunewell train --rehearse`: train on a few rows for two minutes at most, and report whether the model learns."""

import math
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from tunewell.config.load import LoadedConfig
from tunewell.core.errors import UserError
from tunewell.core.progress import Progress, silent
from tunewell.data.batches import DataOrder, spread_evenly
from tunewell.data.corpus.reader import Corpus, Split
from tunewell.inference.runtime import measure_losses
from tunewell.runs.config import RunOptions
from tunewell.runs.rehearsal import Rehearsal
from tunewell.runs.result import healing_summary
from tunewell.training.events import Event, Listener, Note, StepTaken
from tunewell.training.memory import peak_memory
from tunewell.training.run import Ending, Run
from tunewell.training.trial import keep_nothing, take_trial_steps
from tunewell.workflows.train import require_trainable
from tunewell.workflows.trial import trial_run

_SECONDS = 100.0
"""From loading the model to the last answer. Importing torch and ending take the rest of two minutes."""
_TRAIN_SHARE = 0.6
"""Share of the time for steps when rows are chosen; measuring and answering, before and after, take the rest."""
_STEP_COST = 3.0
"""Cost of a step in forward passes of its tokens: one forward and about two for the backward pass."""
_MIN_ROWS, _MAX_ROWS = 20, 200
_FIRST_STEPS, _MIN_STEPS, _USUAL_STEPS, _MAX_STEPS = 2, 6, 10, 24
_PASSES = 3
_QUESTIONS, _ANSWER_TOKENS, _ANSWER_BATCH_TOKENS = 2, 32, 1024


def rehearse(loaded: LoadedConfig, options: RunOptions, listener: Listener = silent) -> Rehearsal:
    """Train on a few rows in a temporary folder. Raise UserError for problems before the first step."""
    if options.is_resuming:
        raise UserError("a rehearsal does not resume a run", fix="leave out `--resume` or `--rehearse`")
    loaded, start = require_trainable(loaded, options)
    evaluate = loaded.config.evaluate.model_copy(update={"samples": _QUESTIONS, "sample_tokens": _ANSWER_TOKENS})
    loaded = replace(loaded, config=loaded.config.model_copy(update={"evaluate": evaluate}))
    with (
        tempfile.TemporaryDirectory(prefix="tunewell-rehearsal-") as folder,
        trial_run(loaded, options, Path(folder), start=start, listener=listener) as (training, corpus, run),
    ):
        recorder, plan, lengths = training.recorder, run.plan, run.order.lengths
        deadline = time.perf_counter() + _SECONDS - recorder.seconds["load"] - recorder.seconds["check"]
        recorder.listeners.append(lambda event: _show_step(event, listener))
        rows, step_tokens = _choose_rows(run, corpus, deadline)
        _use_rows(run, corpus, rows, step_tokens)
        with recorder.stage("before", "measuring the rows before training"):
            before, answers = measure_losses(run.learner, rows, most=None), run.ask(0, _ANSWER_BATCH_TOKENS)
        with recorder.stage("train"):
            # The same work as before follows the steps.
            until = deadline - recorder.seconds["before"]
            steps, ending = _take_steps(run, until, is_owner=options.owns_process)
        with recorder.stage("after", "measuring the rows after training"):
            after, later = measure_losses(run.learner, rows, most=None), run.ask(1, _ANSWER_BATCH_TOKENS)
        return Rehearsal(
            num_rows=len(rows),
            step_tokens=step_tokens,
            before=before,
            after=after,
            answers=list(zip(answers, later, strict=True)),
            steps=steps,
            ending=ending,
            plan=plan,
            num_documents=len(lengths),
            corpus_tokens=int(lengths.sum()),
            peak_memory_bytes=peak_memory(run.learner.device),
            seconds=recorder.total_seconds,
            stages=recorder.seconds,
            next_command="tunewell train",
            notes=[*recorder.notes, *healing_summary(run.healing.entries)],
        )


def _show_step(event: Event, listener: Listener) -> None:
    if isinstance(event, StepTaken):
        listener(Progress(f"training on a few rows, step {event.step}: loss {event.loss:.3f}"))


def _choose_rows(run: Run, corpus: Corpus, deadline: float) -> tuple[Split, int]:
    """Choose rows from all sources, and the tokens of a step, by the time of a forward pass.

    The longest row is included, because it needs the most memory. On a slow machine, short rows are chosen instead.
    """
    lengths = run.order.lengths
    token_seconds = _STEP_COST * _forward_seconds(run, corpus.select(spread_evenly(len(corpus), 4)))
    num_tokens = max(0.0, deadline - time.perf_counter()) * _TRAIN_SHARE / token_seconds
    num_rows = int(num_tokens / _PASSES / lengths.mean())
    if num_rows < _MIN_ROWS:
        parts = np.array_split(np.arange(len(corpus)), min(_MIN_ROWS, len(corpus)))
        chosen = np.array([part[np.argmin(lengths[part])] for part in parts])
        run.listener(Note("the machine is slow for this model, so short rows are used"))
    else:
        chosen = np.append(spread_evenly(len(corpus), min(num_rows, _MAX_ROWS) - 1), np.argmax(lengths))
    rows = corpus.select(np.unique(chosen))
    most = min(run.plan.batch_tokens.value or math.inf, run.plan.micro_batch_tokens.value)
    return rows, int(max(min(num_tokens / _USUAL_STEPS, most), rows.index["length"].max()))


def _forward_seconds(run: Run, rows: Split) -> float:
    """Return the seconds of a forward pass per token, without those of the first pass, which is slower."""
    measure_losses(run.learner, rows, most=None)
    started = time.perf_counter()
    measure_losses(run.learner, rows, most=None)
    return (time.perf_counter() - started) / int(rows.index["length"].sum())


def _use_rows(run: Run, corpus: Corpus, rows: Split, step_tokens: int) -> None:
    """Train on these rows and ask their questions; nothing is evaluated or saved."""
    keep_nothing(run)
    run.documents, corpus.selection = rows, rows
    run.name_of = lambda document: f"{rows[document].source} row {rows[document].row}"
    lengths = rows.index["length"].astype(np.int64)
    run.order = DataOrder(lengths, run.plan.seed, run.plan.corpus_sha256, batch_tokens=step_tokens)


def _take_steps(run: Run, until: float, *, is_owner: bool) -> tuple[list[StepTaken], Ending]:
    """Take a few steps, and then as many as the time allows."""
    take = partial(take_trial_steps, run, because="a rehearsal", handle_signals=is_owner, warmup_steps=_FIRST_STEPS)
    ending, first = take(_FIRST_STEPS)
    if ending.status != "finished":
        return first.taken, ending
    possible = int((until - time.perf_counter()) / max(1e-9, run.seconds["train"] / _FIRST_STEPS))
    ending, others = take(min(max(_FIRST_STEPS + possible, _MIN_STEPS), _MAX_STEPS))
    return first.taken + others.taken, ending
