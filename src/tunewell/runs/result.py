"""The result of a training run, and the listener that records its metrics, notes and times."""

import math
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunewell.config.load import LoadedConfig
from tunewell.core.html import render
from tunewell.core.progress import Progress
from tunewell.core.units import count, duration
from tunewell.machine.facts import process_seconds
from tunewell.records.events import plain
from tunewell.records.healing import HealingEntry
from tunewell.records.report import Curve, Validation
from tunewell.records.rundir import Status, train_again_command
from tunewell.runs.config import RunOptions, resume_command
from tunewell.runs.loss_curve import loss_svg
from tunewell.training.events import Evaluated, Event, Listener, Note, Rewound, StepTaken
from tunewell.training.run import Ending, RunState

_NUM_SHOWN = 6
_REMEDIES = {
    "micro_batch_tokens": "set `train.micro_batch_tokens: {}`: larger micro-batches ran out of memory",
    "is_recomputing": "set `train.recompute: on`: without it, some documents ran out of memory",
    "rate_share": "multiply `train.learning_rate` by {:g}: the run diverged at the planned rate",
    "precision": "set `train.precision: {}`: values overflowed in 16 bits",
    "device": "set `device: cpu`: values were NaN or infinite on the GPU only",
}
"""Field of a healing entry -> advice for its last value."""
_FAULTS = {
    "overfitting": "reduce `train.epochs`, or set `evaluate.patience: 2`, with a selection slice (`data.selection`)",
    "lr-too-high": "lower `train.learning_rate`: the loss rose during training",
    "flat-loss": "the loss did not fall: raise `train.learning_rate`, select more layers with `method.targets` and "
    "`method.layers`, and check with `tunewell inspect` which tokens are supervised",
    "initial-loss-implausible": "check that the weights are complete and the tokenizer fits the model: the first loss "
    "was too high",
    "killed": "close other programs or reduce `train.micro_batch_tokens`: the system killed the run",
}


@dataclass(frozen=True)
class TrainResult:
    """The result of `train`: how the run ended, its losses, its files and the next command."""

    run: Path
    status: Status
    reason: str
    exit_code: int
    steps: int
    num_steps: int
    tokens: int
    supervised_tokens: int
    seconds: float
    stages: dict[str, float]
    tokens_per_second: float
    peak_memory_bytes: int | None
    losses: list[tuple[int, float]]
    held_out: list[tuple[int, float]]
    best_step: int | None
    artefacts: list[tuple[str, str]]
    next_command: str
    notes: list[str] = field(default_factory=list)
    signal: str | None = None
    changes: list[str] = field(default_factory=list)
    """Settings changed on resume with `--allow-change`, one line each."""
    healing: list[HealingEntry] = field(default_factory=list)
    """Faults and remedies since the first start of the run."""
    advice: list[str] = field(default_factory=list)
    lacks_steps: bool = False
    """Whether `events.jsonl` lost steps, so that the first losses are unknown."""
    validation: Validation | None = None
    start_seconds: float | None = None
    """Seconds of this process before the run began: imports. None in a library call."""

    @property
    def first_loss(self) -> float | None:
        return self.losses[0][1] if self.losses and not self.lacks_steps else None

    @property
    def last_loss(self) -> float | None:
        return self.losses[-1][1] if self.losses else None

    @property
    def held_out_first(self) -> float | None:
        return self.held_out[0][1] if self.held_out and not self.lacks_steps else None

    @property
    def held_out_last(self) -> float | None:
        return self.held_out[-1][1] if self.held_out else None

    @property
    def held_out_best(self) -> float | None:
        """The loss of the best evaluation, or the lowest one if checkpoints are not compared."""
        named = [loss for step, loss in self.held_out if step == self.best_step]
        return min((loss for loss in named or dict(self.held_out).values() if math.isfinite(loss)), default=None)

    def __fspath__(self) -> str:
        """Return the run folder, so that a result can be given where a run is expected."""
        return str(self.run)

    def __repr__(self) -> str:
        verdict = "" if self.validation is None else f", verdict={self.validation.verdict}"
        loss = "" if self.last_loss is None else f", loss={self.last_loss:.4f}"
        return f"TrainResult(run={str(self.run)!r}, status={self.status!r}, steps={self.steps}{loss}{verdict})"

    @property
    def curve(self) -> Curve:
        return Curve(train=self.losses, held_out=self.held_out, best_step=self.best_step)

    def _repr_html_(self) -> str:
        curve = loss_svg(self.curve, title=self.run.name) if len(self.losses) > 1 else ""
        return render("tunewell.runs", "result.html", result=self, curve=curve)

    def outcome_fields(self) -> dict[str, Any]:
        """Return what `outcome.json` and `train --json` have in common."""
        same = (
            "status",
            "reason",
            "steps",
            "tokens",
            "supervised_tokens",
            "first_loss",
            "last_loss",
            "notes",
            "advice",
        )
        return {
            **{name: getattr(self, name) for name in same},
            "held_out": {"first": self.held_out_first, "last": self.held_out_last, "best": self.held_out_best},
            "stages": {name: round(seconds, 3) for name, seconds in self.stages.items()},
        }

    def as_json(self) -> dict[str, Any]:
        """Return the object that `train --json` prints."""
        report, shared = self.validation and self.validation.report, self.outcome_fields()
        payload = {
            **shared,
            "run": str(self.run),
            "num_steps": self.num_steps,
            "held_out": {**shared["held_out"], "best_step": self.best_step},
            "tokens_per_second": round(self.tokens_per_second, 2),
            "peak_memory_bytes": self.peak_memory_bytes,
            "seconds": round(self.seconds, 3),
            "artefacts": dict(self.artefacts),
            "healing": [entry.as_json() for entry in self.healing],
            "next": self.next_command,
            "verdict": report and report.verdict,
            "reasons": [reason.model_dump() for reason in report.reasons] if report else [],
        }
        return plain(payload)


class MetricsRecorder:
    """A listener that records losses, notes and stage times, and forwards every event."""

    def __init__(self, *listeners: Listener) -> None:
        self.listeners: list[Listener] = [*listeners]
        self.losses: list[tuple[int, float]] = []
        self.held_out: list[tuple[int, float]] = []
        self.notes: list[str] = []
        self.changes: list[str] = []
        self.seconds: dict[str, float] = {}
        """Seconds spent in each stage before the first step."""
        self.lacks_steps = False
        """Whether `events.jsonl` lost steps before this process resumed the run, so that the first loss is unknown."""
        self._started = time.perf_counter()

    @property
    def total_seconds(self) -> float:
        """Seconds since this process started the run."""
        return time.perf_counter() - self._started

    @contextmanager
    def stage(self, name: str, message: str = "") -> Iterator[None]:
        """Report the start of a stage, and measure the time spent in the `with` block."""
        if message:
            self(Progress(message))
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def __call__(self, event: Event) -> None:
        match event:
            case StepTaken(step=step, loss=loss) if event.supervised_tokens:  # otherwise it has no loss
                self.losses.append((step, loss))
            case Evaluated(step=step, loss=loss):
                self.held_out.append((step, loss))
            case Rewound(step):
                self.losses = [(at, loss) for at, loss in self.losses if at <= step]
                self.held_out = [(at, loss) for at, loss in self.held_out if at <= step]
            case Note(message, is_passing=False):
                self.notes.append(message)
        for listener in self.listeners:
            listener(event)

    def note(self, message: str) -> None:
        """Send a note."""
        self(Note(message))


def make_result(
    loaded: LoadedConfig,
    run: RunState,
    ending: Ending,
    *,
    recorder: MetricsRecorder,
    first_tokens: int,
    peak_bytes: int | None,
    options: RunOptions,
) -> TrainResult:
    """Return the result of a run. `first_tokens` is the number of tokens trained on before this process started.

    `peak_bytes` is the peak memory of the GPU or, on the CPU, of the process.
    """
    folder = run.checkpoints.folder
    seconds = run.seconds["train"]
    tokens = run.progress.tokens - first_tokens
    newest, best = run.checkpoints.newest(), run.checkpoints.best()
    is_own_memory = options.is_alone or run.plan.device.value.startswith("cuda")
    age = process_seconds() if options.owns_process and options.is_alone else None
    if ending.is_resumable:
        following = resume_command(loaded, options)
    elif ending.settings:
        following = train_again_command(folder.parent, ending.settings)
    else:
        command = "validate" if ending.status == "finished" else "diagnose"
        following = f"tunewell {command} {shlex.quote(str(folder.parent))}"
    artefacts = []
    if best is not None and newest is not None and best.step != newest.step:
        artefacts.append((str(best.path), f"the best checkpoint, step {best.step}: {best.why_best}"))
    if newest is not None:
        artefacts.append((str(newest.path), f"the newest checkpoint, step {newest.step}"))
    artefacts.append((str(folder.parent / "events.jsonl"), "the metrics of every step"))
    return TrainResult(
        run=folder.parent,
        status=ending.status,
        reason=ending.reason,
        exit_code=ending.exit_code,
        steps=run.progress.step,
        num_steps=run.plan.num_steps.value,
        tokens=run.progress.tokens,
        supervised_tokens=run.progress.supervised_tokens,
        seconds=recorder.total_seconds,
        start_seconds=None if age is None else max(0.0, age - recorder.total_seconds),
        stages={**recorder.seconds, **run.seconds},
        tokens_per_second=tokens / seconds if seconds else 0.0,
        peak_memory_bytes=peak_bytes if is_own_memory else None,
        losses=recorder.losses,
        lacks_steps=recorder.lacks_steps,
        held_out=recorder.held_out,
        best_step=run.progress.best_step,
        artefacts=artefacts,
        next_command=following,
        notes=recorder.notes,
        signal=ending.signal,
        changes=recorder.changes,
        healing=run.healing.entries,
        advice=[*([ending.advice] if ending.advice else []), *advice(run.healing.entries)],
    )


def healing_summary(entries: Sequence[HealingEntry]) -> list[str]:
    """Return one line for each of the first faults and warnings, and a line with the total cost."""
    shown = [entry for entry in entries if entry.severity != "note" or entry.action != "none"]
    lines = [f"step {count(entry.step)}: {entry.words}" for entry in shown[:_NUM_SHOWN]]
    if len(shown) > _NUM_SHOWN:
        lines.append(f"and {count(len(shown) - _NUM_SHOWN)} more, in `healing.jsonl`")
    return [*lines, *([cost] if (cost := _cost(shown)) else [])]


def _cost(entries: Sequence[HealingEntry]) -> str:
    actions = Counter(e.action for e in entries if e.action != "skip" or e.name != "out-of-memory")
    repeated = Counter(e.action for e in entries if e.micro_batch_tokens is None)
    amounts = [
        (actions["skip"], "update", " skipped"),
        (len({document for e in entries for document in e.documents}), "document", " left out"),
        (repeated["split"] + repeated["recompute"], "step", " repeated in smaller parts"),
        (actions["rewind"], "rewind", " to a checkpoint"),
        (actions["restart"], "restart", ""),
    ]
    parts = [f"{count(number, noun)}{what}" for number, noun, what in amounts if number]
    if (seconds := sum(e.seconds_lost for e in entries)) >= 1:
        parts.append(f"about {duration(seconds)} lost")
    return f"in total: {', '.join(parts)}" if parts else ""


def advice(entries: Sequence[HealingEntry]) -> list[str]:
    """Return the settings to change so that the next run does not have the same problems."""
    found: list[str] = []
    # A run that stopped because it diverged names one rate as its reason; a second one would contradict it.
    has_rate = any(entry.name == "lr-too-high" and entry.action == "stop" for entry in entries)
    for name, text in _REMEDIES.items():
        if name == "rate_share" and has_rate:
            continue
        if values := [value for entry in entries if (value := getattr(entry, name))]:
            found.append(text.format(values[-1]))
    if rows := [row for entry in entries if entry.documents for row in entry.numbers.get("rows", [])]:
        found.append(f"check {', '.join(dict.fromkeys(rows[:3]))}: left out, because they caused NaN or infinity")
    names = {entry.name for entry in entries if entry.name != "lr-too-high" or entry.action == "none"}
    return found + [text for name, text in _FAULTS.items() if name in names]
