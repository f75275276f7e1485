"""`tunewell train --rehearse`: train on a few rows for two minutes at most, and report whether the model learns."""

import math
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from tunewell.config.load import LoadedConfig
from tunewell.core.errors import UserError
from tunewell.core.progress import Progress, silent
from tunewell.data.batches import DataOrder, spread_evenly
from tunewell.data.corpus.reader import Corpus, Split
from tunewell.inference.runtime import measure_losses
from tunewell.records.plan import Chosen
from tunewell.runs.config import RunOptions
from tunewell.runs.folder import open_run_folder
from tunewell.runs.rehearsal import Rehearsal
from tunewell.runs.result import healing_summary
from tunewell.training.checkpoints import NoCheckpoints
from tunewell.training.engine import train as take_steps
from tunewell.training.events import Event, Listener, Note, StepTaken
from tunewell.training.memory import peak_memory
from tunewell.training.run import Ending, Run
from tunewell.workflows.train import Training, require_trainable

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
    steps: list[StepTaken] = []

    def listen(event: Event) -> None:
        if isinstance(event, StepTaken):
            steps.append(event)
            event = Progress(f"training on a few rows, step {event.step}: loss {event.loss:.3f}")
        if isinstance(event, Progress) and event.stage != "saving a checkpoint":  # nothing is saved
            listener(event)

    with tempfile.TemporaryDirectory(prefix="tunewell-rehearsal-") as folder:
        evaluate = loaded.config.evaluate.model_copy(update={"samples": _QUESTIONS, "sample_tokens": _ANSWER_TOKENS})
        config = loaded.config.model_copy(update={"run": str(Path(folder) / "run"), "evaluate": evaluate})
        training = Training(replace(loaded, config=config), options, listen, start)
        if training.world.size > 1:
            raise UserError("a rehearsal runs in one process", fix="start it without `torchrun`")
        return _rehearse(training, steps)


def _rehearse(training: Training, steps: list[StepTaken]) -> Rehearsal:
    recorder = training.recorder
    with open_run_folder(training.loaded, training.world, is_resuming=False) as folder:
        training.prepare()
        corpus, plan, order = training.plan(folder)
        deadline = time.perf_counter() + _SECONDS
        with training.process_settings(plan):
            _, run = training.build(folder, corpus, plan, order)
            rows, step_tokens = _choose_rows(run, corpus, deadline)
            _use_rows(run, corpus, rows, step_tokens)
            with recorder.stage("before", "measuring the rows before training"):
                before, answers = measure_losses(run.learner, rows, most=None), run.ask(0, _ANSWER_BATCH_TOKENS)
            with recorder.stage("train"):
                # The same work as before follows the steps.
                until = deadline - recorder.seconds["before"]
                ending = _take_steps(run, until, is_owner=training.options.owns_process)
            with recorder.stage("after", "measuring the rows after training"):
                after, later = measure_losses(run.learner, rows, most=None), run.ask(1, _ANSWER_BATCH_TOKENS)
        run.close()
        return Rehearsal(
            num_rows=len(rows),
            step_tokens=step_tokens,
            before=before,
            after=after,
            answers=list(zip(answers, later, strict=True)),
            steps=steps,
            ending=ending,
            plan=plan,
            num_documents=len(order.lengths),
            corpus_tokens=int(order.lengths.sum()),
            peak_memory_bytes=peak_memory(run.learner.device),
            seconds=recorder.total_seconds,
            stages=recorder.seconds,
            next_command="tunewell train",
            notes=[*recorder.notes, *healing_summary(run.healing.entries)],
        )


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
    """Train on these rows and ask their questions; no row is held out, and no checkpoint is written."""
    run.documents, run.held_out, corpus.held_out = rows, rows.select(np.zeros(0, np.int64)), rows
    run.name_of = lambda document: f"{rows[document].source} row {rows[document].row}"
    lengths = rows.index["length"].astype(np.int64)
    run.order = DataOrder(lengths, run.plan.seed, run.plan.corpus_sha256, batch_tokens=step_tokens)
    run.checkpoints = NoCheckpoints(run.checkpoints.folder, keep=1, on_trouble=silent)


def _take_steps(run: Run, until: float, *, is_owner: bool) -> Ending:
    """Take a few steps, and then as many as the time allows."""
    ending = _up_to_step(run, _FIRST_STEPS, is_owner=is_owner)
    step_seconds = run.seconds["train"] / _FIRST_STEPS
    possible = int((until - time.perf_counter()) / max(1e-9, step_seconds))
    num_steps = min(max(_FIRST_STEPS + possible, _MIN_STEPS), _MAX_STEPS)
    return _up_to_step(run, num_steps, is_owner=is_owner) if ending.status == "finished" else ending


def _up_to_step(run: Run, num_steps: int, *, is_owner: bool) -> Ending:
    because = "a rehearsal"
    update = {
        "num_steps": Chosen[int](value=num_steps, because=because),
        "warmup_steps": Chosen[int](value=_FIRST_STEPS, because=because),
        "schedule": run.plan.schedule.model_copy(update={"value": "constant", "because": because}),
    }
    run.plan = run.plan.model_copy(update=update)
    return take_steps(run, handle_signals=is_owner)
