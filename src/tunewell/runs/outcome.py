"""What a run came to, and what it leaves behind for whoever finds its folder."""

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunewell.config.load import LoadedConfig
from tunewell.config.methods import METHODS
from tunewell.core.errors import UserError
from tunewell.core.redact import redact
from tunewell.core.units import count, duration
from tunewell.data.corpus.reader import Corpus
from tunewell.hardware.probe import memory_in_use
from tunewell.records.healing import HealingEntry
from tunewell.records.outcome import OUTCOME, HeldOutLosses, Outcome, write_outcome
from tunewell.records.plan import Plan
from tunewell.records.report import Curve
from tunewell.runs.config import resume_command
from tunewell.runs.loss_curve import write_loss_svg
from tunewell.runs.options import RunOptions
from tunewell.runs.readme import Usage, run_readme
from tunewell.runs.result import MetricsRecorder, TrainResult
from tunewell.training.engine import Ending, Run

# Tell what a run went through: what was healed, what that cost, and what to change next time.

_SHOWN = 6


def healing_summary(entries: Sequence[HealingEntry]) -> list[str]:
    """Give a line for each thing that was more than a note, the first few of many, and one for what it all cost."""
    told = [entry for entry in entries if entry.severity != "note" or entry.action != "none"]
    lines = [_line(entry) for entry in told[:_SHOWN]]
    if len(told) > _SHOWN:
        lines.append(f"and {count(len(told) - _SHOWN)} more, in `healing.jsonl`")
    return [*lines, *([cost] if (cost := _cost(told)) else [])]


def advice(entries: Sequence[HealingEntry]) -> list[str]:
    """Say what to change so that the next run need not be healed."""
    found: list[str] = []
    limits = [entry.micro_batch_tokens for entry in entries if entry.micro_batch_tokens is not None]
    if limits:
        found.append(f"set `train.micro_batch_tokens: {limits[-1]}`: more did not fit into memory")
    if any(entry.is_recomputing for entry in entries):
        found.append("set `train.recompute: true`: documents did not fit into memory without")
    shares = [entry.rate_share for entry in entries if entry.rate_share is not None]
    if shares:
        found.append(f"multiply `train.learning_rate` by {shares[-1]:g}: at the planned rate the run went wrong")
    precisions = [entry.precision for entry in entries if entry.precision is not None]
    if precisions:
        found.append(f"set `train.precision: {precisions[-1]}`: numbers overflowed in 16 bits")
    if any(entry.device for entry in entries):
        found.append("set `device: cpu`: numbers went bad on the GPU alone")
    rows = [row for entry in entries if entry.documents for row in entry.numbers.get("rows", [])]
    if rows:
        found.append(f"look at {', '.join(dict.fromkeys(rows[:3]))}: left out, since numbers went bad with them")
    names = {entry.name for entry in entries}
    if "overfitting" in names:
        found.append("train for fewer `train.epochs`, or set `evaluate.patience: 2`; the best checkpoint is kept")
    if "initial-loss-implausible" in names:
        found.append("check that the weights are whole and the tokenizer is the model's own: the first loss was absurd")
    if "killed" in names:
        found.append("close other programs or use a smaller `train.micro_batch_tokens`: the system ended the run")
    return found


def _line(entry: HealingEntry) -> str:
    return f"step {count(entry.step)}: {entry.words}"


def _cost(told: Sequence[HealingEntry]) -> str:
    skipped = sum(1 for e in told if e.action == "skip" and e.name != "out-of-memory")
    again = sum(1 for e in told if e.action in ("split", "recompute") and e.micro_batch_tokens is None)
    back = [e for e in told if e.action == "rewind"]
    restarts = sum(1 for e in told if e.action == "restart")
    rows = len({document for e in told for document in e.documents})
    lost = sum(e.seconds_lost for e in told)
    parts = [
        f"{count(skipped, 'update')} left out" if skipped else "",
        f"{count(rows, 'document')} left out" if rows else "",
        f"{count(again, 'step')} taken again in smaller parts" if again else "",
        f"{count(len(back), 'time')} back to a checkpoint" if back else "",
        f"{count(restarts, 'restart')}" if restarts else "",
        f"about {duration(lost)} lost" if lost >= 1 else "",
    ]
    words = ", ".join(part for part in parts if part)
    return f"in all: {words}" if words else ""


@dataclass(frozen=True)
class Since:
    """Where this sitting of a run began."""

    started: float
    tokens: int
    options: RunOptions


def make_result(
    loaded: LoadedConfig, run: Run, ending: Ending, *, recorder: MetricsRecorder, stages: dict[str, float], since: Since
) -> TrainResult:
    """Say what a run came to."""
    folder = run.checkpoints.folder
    seconds = run.seconds["train"]
    tokens = run.progress.tokens - since.tokens
    newest, best = run.checkpoints.newest(), run.checkpoints.best()
    artefacts = []
    if best is not None and newest is not None and best.step != newest.step:
        artefacts.append((str(best.path), f"the best by held-out loss, step {best.step}"))
    if newest is not None:
        artefacts.append((str(newest.path), f"the newest, step {newest.step}"))
    artefacts += [(str(folder.parent / "events.jsonl"), "every step in raw numbers")]
    return TrainResult(
        run=folder.parent,
        status=ending.status,
        reason=ending.reason,
        exit_code=ending.exit_code,
        steps=run.progress.step,
        num_steps=run.plan.num_steps.value,
        tokens=run.progress.tokens,
        supervised_tokens=run.progress.supervised_tokens,
        seconds=time.perf_counter() - since.started,
        stages={**stages, **run.seconds},
        tokens_per_second=tokens / seconds if seconds else 0.0,
        peak_memory_bytes=memory_in_use(run.learner.device),
        losses=recorder.losses,
        held_out=recorder.held_out,
        best_step=run.progress.best_step,
        artefacts=artefacts,
        next_command=_next(loaded, ending, folder.parent, since.options),
        notes=recorder.notes,
        signal=ending.signal,
        changes=recorder.changes,
        healing=run.remedies.entries,
        advice=[*([ending.advice] if ending.advice else []), *advice(run.remedies.entries)],
    )


def _next(loaded: LoadedConfig, ending: Ending, run: Path, options: RunOptions) -> str:
    if ending.is_resumable:
        return resume_command(loaded, options)
    # A run that health stopped has its last good checkpoint, which may be worth something.
    return f"tunewell validate {shlex.quote(str(run))}" if ending.status == "finished" else ""


def write_run_files(run: Run, result: TrainResult, plan: Plan, corpus: Corpus, *, allow_pickle: bool) -> None:
    """Write what tells the story of the run to whoever finds its folder."""
    if result.losses:
        path = result.run / "loss.svg"
        curve = Curve(train=result.losses, held_out=result.held_out, best_step=result.best_step)
        try:
            write_loss_svg(path, curve, title=redact(Path(plan.model).name))
            result.artefacts.append((str(path), "the loss curve"))
        except (UserError, OSError) as error:
            # The training is done and saved: a missing picture does not make it a failed run.
            result.notes.append(f"the loss curve could not be written: {error}")
    try:
        write_outcome(result.run, _outcome(result, plan))
        told, healed, usage = result.as_json(), healing_summary(result.healing), _usage(run, allow_pickle)
        run_readme(result.run, plan=plan, manifest=corpus.manifest, result=told, healed=healed, usage=usage)
    except (UserError, OSError) as error:
        why = error.what if isinstance(error, UserError) else error.strerror or error
        result.notes.append(f"`{OUTCOME}` or the run's `README.md` could not be written: {why}")


def _outcome(result: TrainResult, plan: Plan) -> Outcome:
    return Outcome(
        made_by=plan.made_by,
        status=result.status,
        reason=result.reason,
        steps=result.steps,
        planned_steps=result.num_steps,
        first_loss=result.first_loss,
        last_loss=result.last_loss,
        held_out=HeldOutLosses(first=result.held_out_first, last=result.held_out_last, best=result.held_out_best),
        best_step=result.best_step,
        seconds=result.seconds,
        tokens=result.tokens,
        supervised_tokens=result.supervised_tokens,
        artefacts={what: _from_run(path, result.run) for path, what in result.artefacts},
        notes=result.notes,
        healing=healing_summary(result.healing),
        advice=result.advice,
        signal=result.signal,
        allowed_changes=result.changes,
    )


def _usage(run: Run, allow_pickle: bool) -> Usage:
    config: Any = run.learner.model.config
    rows = config.get_text_config().vocab_size
    return Usage(METHODS.entry(run.plan.method.value).is_adapter, rows, allow_pickle)


def _from_run(path: str, run: Path) -> str:
    return Path(path).relative_to(run).as_posix() if Path(path).is_relative_to(run) else path
