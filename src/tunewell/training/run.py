"""The state of a training run: its parts, its progress, and functions to resume and rewind it."""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from tunewell.config.schema import Config
from tunewell.core.errors import UserError
from tunewell.data.batches import DataOrder, TokenizedDocuments
from tunewell.methods.base import Method
from tunewell.records.checkpoint import saved_steps
from tunewell.records.events import EventLog, read_events, with_numbers
from tunewell.records.plan import Plan
from tunewell.records.rundir import Status
from tunewell.training.checkpoints import Checkpoints, State, load_state
from tunewell.training.events import Listener, Rewound, Sample, send_notes
from tunewell.training.find_checkpoints import OPTIMIZER, find_newest
from tunewell.training.health import RunContext
from tunewell.training.recovery import HealingState
from tunewell.training.step import TrainableModel


@dataclass
class RunProgress:
    """The progress of a run. It is saved in every checkpoint, so the field names must not change."""

    step: int = 0
    """Number of finished optimizer steps."""
    best_loss: float | None = None
    """The loss of the best evaluation."""
    best_step: int | None = None
    best_share: float | None = None
    """The share of right answers of the best evaluation; None if checkpoints are compared by the loss."""
    most_right: float | None = None
    """The largest share of right answers of all evaluations. That of the best may be smaller by chance."""
    looks_without_gain: int = 0
    """Number of evaluations since the last with more right answers, or a lower loss."""
    last_look: int = -1
    """Step of the last evaluation; -1 before the first."""
    tokens: int = 0
    supervised_tokens: int = 0

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> "RunProgress":
        """Return the progress that a checkpoint has, with other values."""
        return cls(**{name: value for name, value in saved.items() if name in cls.__dataclass_fields__})


@dataclass(kw_only=True)
class RunState:
    """The progress and the files of a run, whichever engine takes its steps."""

    plan: Plan
    checkpoints: Checkpoints
    events: EventLog
    healing: HealingState
    identity: dict[str, Any] = field(default_factory=dict)
    progress: RunProgress = field(default_factory=RunProgress)
    seconds: dict[str, float] = field(default_factory=lambda: {"train": 0.0, "look": 0.0, "save": 0.0})

    def close(self) -> None:
        """Wait for the pending checkpoint, and close the logs and the thread that writes checkpoints."""
        self.checkpoints.close()
        self.events.close()
        self.healing.close()


@dataclass(kw_only=True)
class Run(RunState):
    """All parts of a run; `build.py` creates it."""

    config: Config
    learner: TrainableModel
    order: DataOrder
    documents: TokenizedDocuments
    held_out: TokenizedDocuments
    """The rows that are evaluated: the selection slice, else the held-out rows."""
    samples: EventLog
    listener: Listener
    method: Method
    load_weights: Callable[[], Mapping[str, Tensor]]
    """Reloads the initial weights of the model by name, including frozen ones."""
    ask: Callable[[int, int], list[Sample]] = lambda step, batch_tokens: []
    """Answers held-out questions; takes the step and the tokens per batch."""
    num_answers: int = 0
    """Answers of each evaluation that are right or wrong; 0 if checkpoints are compared by the loss."""
    is_selecting: bool = True
    """Whether evaluations choose the checkpoint and end training early: those of a selection slice do."""
    name_of: Callable[[int], str] = lambda document: f"document {document}"
    """Returns the source and row of a document."""
    about: RunContext = field(default_factory=RunContext)
    home: Path | None = None
    """The checkpoint folder of the run. Ranks other than 0 write to a different folder."""
    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=8))
    """Times of the last steps."""

    @property
    def micro_batch_tokens(self) -> int:
        """The tokens of a micro-batch: those of the plan, or fewer after out-of-memory errors."""
        return self.healing.limits.cap(self.plan.micro_batch_tokens.value)

    def close(self) -> None:
        super().close()
        self.samples.close()


@dataclass(frozen=True)
class Ending:
    """The status with which training ended, and the reason."""

    status: Status
    reason: str
    exit_code: int = 0
    signal: str | None = None
    advice: str | None = None
    """What to change before the next attempt, if the run stopped with a problem."""
    settings: tuple[str, ...] = ()
    """Settings of the next attempt, if they are known."""
    is_resumable: bool = False


def state_of(run: Run) -> State:
    """Return the state to save in a checkpoint."""
    tensors, texts = run.method.files(run.plan.model)
    scaler = run.learner.scaler
    return State(
        step=run.progress.step,
        tensors={**tensors, OPTIMIZER: run.learner.optimizer.state_tensors()},
        texts=texts,
        progress={
            **run.progress.__dict__,
            "scaler": {"scale": float(scaler.scale), "steps_since": float(scaler.steps_since)}
            if scaler.is_on
            else None,
            "quarantine": {str(document): since for document, since in run.healing.quarantine.items()},
            "events": run.events.written().model_dump(),
        },
        identity=run.identity,
    )


def resume(run: Run, state: State) -> None:
    """Restore a run from a checkpoint: weights, optimizer, loss scale, progress and logs."""
    run.method.restore(state.tensors)
    run.learner.optimizer.load_state(state.tensors[OPTIMIZER] if has_same_optimizer(run, state) else {})
    run.progress = RunProgress.of(state.progress)
    if not run.is_selecting:  # an older version chose among checkpoints on held-out rows
        run.progress.best_loss = run.progress.best_step = None
    if not run.healing.entries:  # `healing.jsonl` is never truncated, so it has more entries than the checkpoint
        for document, since in (state.progress.get("quarantine") or {}).items():
            run.healing.leave_out([int(document)], since=int(since))
    scaler = run.learner.scaler
    if scaler.is_on and (saved := state.progress.get("scaler")):
        scaler.scale.fill_(saved["scale"])
        scaler.steps_since.fill_(saved["steps_since"])
    _truncate_logs(run)


def has_same_optimizer(run: Run, state: State) -> bool:
    """Return whether the optimizer states of a checkpoint fit the run. `--allow-change` allows another optimizer."""
    names = {"optimizer": "adamw", "galore_rank": None, "galore_8bit": None}
    return all(state.identity.get(name, old) == run.identity.get(name, old) for name, old in names.items())


def rewind(run: Run, *, not_after: int, or_later: bool, are_weights_bad: bool) -> int:
    """Rewind to the newest undamaged checkpoint at or before step `not_after`, or to the start, and return its step.

    With `or_later`, use the oldest checkpoint if all checkpoints are later: every checkpoint is finite, so it is better
    than the start. Later checkpoints and log lines are removed. With `are_weights_bad`, all weights are reloaded first,
    because an adapter checkpoint contains only the adapter.
    """
    world = run.learner.world
    run.checkpoints.wait()
    world.barrier()
    run.learner.drop_gradients()
    home = run.home or run.checkpoints.folder
    limits = [not_after, *(reversed(saved_steps(home)) if or_later else ())]
    note = send_notes(run.listener)
    found = (find_newest(home, on_trouble=note, not_after=step, is_needed=False) for step in limits)
    saved = next(filter(None, found), None)
    if are_weights_bad or saved is None:
        run.method.reset(run.load_weights())
    if saved is None:
        run.learner.optimizer.load_state({})
        run.progress = RunProgress()
        _truncate_logs(run)
        run.progress = _initial_progress(run)
    else:
        resume(run, load_state(saved, needs=[OPTIMIZER]))
    world.barrier()  # no rank may remove a checkpoint that another rank is still reading
    if world.is_first:
        run.checkpoints.remove_after(run.progress.step)
    run.listener(Rewound(run.progress.step))
    return run.progress.step


def _initial_progress(run: Run) -> RunProgress:
    """Return the progress before the first step, including the evaluation at step 0."""
    for event in past_events(run, kind="held_out", until=0):
        if math.isfinite(loss := event["loss"]):
            judged = event.get("judged")
            found = RunProgress(best_loss=loss, best_step=0, best_share=event["right"] / judged if judged else None)
            return replace(found if run.is_selecting else RunProgress(), last_look=0)
    return RunProgress()


def past_events(run: Run, *, kind: str, until: int) -> list[dict[str, Any]]:
    """Return the logged events of a kind up to a step, on any rank. Return an empty list if the log is unreadable."""
    path = run.events.path if run.home is None else run.home.parent / run.events.path.name
    try:
        events = [with_numbers(event) for event in read_events(path)]
    except UserError:
        return []
    return [event for event in events if event.get("kind") == kind and event.get("step", 0) <= until]


def _truncate_logs(run: Run) -> None:
    if run.learner.world.is_first:
        run.events.truncate_to(run.progress.step)
        run.samples.truncate_to(run.progress.step)
