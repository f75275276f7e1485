"""Runs whose steps another engine takes: its protocol, and the run to which it reports what it does.

    TrainingEngine.require -> plan -> TrainingEngine.train(EngineRun) -> Ending

The engine trains; `EngineRun` writes events, findings and checkpoints, so that the run folder is like any other.
Registered in `ENGINES` (`config/extensions.py`); `features/engines` has two.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from tunewell.config.extensions import ENGINES, NATIVE
from tunewell.config.load import LoadedConfig
from tunewell.config.schema import Config
from tunewell.core.errors import UserError
from tunewell.core.launcher import is_launched
from tunewell.core.units import count
from tunewell.data.corpus.reader import Corpus
from tunewell.records.events import read_losses
from tunewell.records.healing import HealingEntry
from tunewell.records.plan import Chosen, EngineRecord, Plan, read_plan
from tunewell.runs.config import RunOptions, has_begun
from tunewell.runs.result import MetricsRecorder
from tunewell.training.checkpoints import State, compare_identity
from tunewell.training.events import Evaluated, Healed, RunStarted, StepTaken
from tunewell.training.find_checkpoints import find_newest
from tunewell.training.run import Ending, RunProgress, RunState


class TrainingEngine(Protocol):
    """A program that takes the training steps of a run, such as the trainer of another library."""

    def require(self, loaded: LoadedConfig) -> EngineRecord:
        """Check the installation and the settings before anything is prepared. Raise UserError if it cannot train."""
        ...

    def limits(self, loaded: LoadedConfig) -> list[str]:
        """Return what the engine cannot do and which settings have no effect, for the user to know before it starts."""
        ...

    def adapt(self, plan: Plan, corpus: Corpus) -> Plan:
        """Return the plan with the values that the engine will use."""
        ...

    def train(self, run: "EngineRun") -> Ending:
        """Take the steps from `run.progress.step` on, and report them to `run`."""
        ...

    def can_resume(self, folder: Path, step: int) -> bool:
        """Return whether the engine has what it needs to go on from this checkpoint of a run folder."""
        ...


def find_engine(loaded: LoadedConfig, options: RunOptions) -> tuple[TrainingEngine, EngineRecord] | None:
    """Return the engine of a config and its versions, or None for tunewell's own. Raise UserError if it cannot train.

    A run is resumed with the engine that began it.
    """
    name = loaded.config.engine
    if options.is_resuming and has_begun(loaded):
        folder = loaded.path(loaded.config.run)
        before = read_plan(folder).engine
        if (began := before.name if before else NATIVE) != name:
            raise UserError(
                f"the run was begun with `engine: {began}`, and the config has `engine: {name}`",
                where=str(folder),
                fix=f"resume it with `--engine {began}`, or start a new run with `--out`",
            )
    if name == NATIVE:
        return None
    if is_launched():
        raise UserError(f"`engine: {name}` trains in one process", fix="start it without `torchrun`")
    if options.faults:
        raise UserError(f"faults cannot be injected with `engine: {name}`", fix="remove TUNEWELL_FAULTS")
    engine: TrainingEngine = ENGINES.load(name)()
    return engine, engine.require(loaded)


def adapt_plan(plan: Plan, corpus: Corpus, engine: TrainingEngine, record: EngineRecord) -> Plan:
    """Return the plan of a run with another engine: steps of whole documents, and no prediction of ours."""
    update: dict[str, Any] = {"engine": record, "prediction": None}
    if plan.answers is not None:
        update["answers"] = Chosen(0, because=f"`{record.name}` compares checkpoints by the loss")
    if tokens := plan.batch_tokens.value:
        number = max(1, round(tokens / float(corpus.index["length"].mean())))
        update["batch_documents"] = Chosen(
            number, because=f"about {count(tokens, 'token')}; `{record.name}` counts rows"
        )
        update["batch_tokens"] = Chosen(None, because="`batch_documents` sets the size of a step")
    return engine.adapt(plan.model_copy(update=update), corpus)


@dataclass(kw_only=True)
class EngineRun(RunState):
    """A run whose steps another engine takes: what the engine needs, and what it reports."""

    loaded: LoadedConfig
    corpus: Corpus
    folder: Path
    options: RunOptions
    recorder: MetricsRecorder
    beat: Callable[[], None]
    """To be called now and then: the run is alive."""
    on_start: Callable[[RunStarted], None]
    """Called before the first step."""
    has_started: bool = False
    peak_bytes: int | None = None

    @property
    def config(self) -> Config:
        return self.loaded.config

    def restore(self, can_resume: Callable[[Path, int], bool]) -> bool:
        """Go on from the newest checkpoint, or from the start. Return True if the plan must be written again."""
        note = self.recorder.note
        saved = find_newest(self.checkpoints.folder, on_trouble=note)
        if saved is None:
            note("there is no valid checkpoint yet: the run starts from step 0")
            self.events.truncate_to(-1)
            return True
        if not can_resume(self.folder, saved.step):
            raise UserError(
                f"the checkpoint of step {saved.step} has no optimizer states, so the run cannot go on from it",
                where=f"`engine: {self.config.engine}` keeps them only until a run is finished",
                fix="start a new run with `--out`",
            )
        changes = compare_identity(saved.manifest.identity, self.identity, set(self.options.allowed_changes))
        self.recorder.changes += changes
        self.progress = RunProgress.of(saved.manifest.progress)
        self.events.truncate_to(saved.step)
        self.recorder.losses, self.recorder.held_out = read_losses(self.events.path)
        note(f"resumed after step {saved.step}")
        return bool(changes)

    def start(self, *, num_trainable: int, num_parameters: int) -> None:
        """Report that the model is loaded and the first step begins."""
        self.has_started = True
        self.on_start(RunStarted(self.plan, num_trainable, num_parameters, self.progress.step))

    def step(self, event: StepTaken) -> None:
        """Log a step."""
        self.progress.step = event.step
        self.progress.tokens += event.tokens
        self.progress.supervised_tokens += event.supervised_tokens
        self.seconds["train"] += event.seconds
        self.peak_bytes = event.memory_bytes
        self.events.append({"kind": "step", **event.__dict__})
        self.recorder(event)

    def evaluate(self, *, step: int, loss: float, tokens: int, documents: int, seconds: float) -> None:
        """Log an evaluation. Those on a selection slice choose the best checkpoint."""
        progress, best = self.progress, self.progress.best_loss
        is_best = len(self.corpus.selection) > 0 and math.isfinite(loss) and (best is None or loss < best)
        if is_best:
            progress.best_loss, progress.best_step = loss, step
        progress.last_look = step
        self.seconds["look"] += seconds
        event = Evaluated(step, loss, tokens, documents, seconds, is_best)
        self.events.append({"kind": "held_out", **event.__dict__})
        self.recorder(event)

    def heal(self, entry: HealingEntry) -> None:
        """Log a finding."""
        self.healing.add(entry)
        self.recorder(Healed(entry))

    def save(self, tensors: Mapping[str, Tensor], file: str, texts: dict[str, str]) -> None:
        """Write a checkpoint of the last step: the weights in a file of this name, and its text files."""
        self.events.sync()
        progress = {**self.progress.__dict__, "events": self.events.written().model_dump()}
        state = State(self.progress.step, {file: dict(tensors)}, texts, progress, self.identity)
        self.checkpoints.save(state, is_best=self.progress.best_step == state.step, wait=True)
