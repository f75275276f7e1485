"""Run the trials of a sweep one after another in this process: prepare, train, repeat with seeds, conclude."""

import gc
import json
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tunewell.config.extensions import METHODS
from tunewell.config.keys import parse_key, resolve_alias
from tunewell.config.load import ConfigLike, LoadedConfig, as_sets
from tunewell.core.errors import UserError
from tunewell.core.files import is_disk_full, write_atomic
from tunewell.core.units import count, size_bytes
from tunewell.evaluation.session import ValidateOptions
from tunewell.features.sweep.budget import conclude_budget
from tunewell.features.sweep.sweep import (
    SWEEP,
    SweepResult,
    SweepSpec,
    Trial,
    TrialResult,
    conclude,
    repetitions,
    trial_result,
    write_sweep,
)
from tunewell.machine.device import measure_threads
from tunewell.models.shared import sharing
from tunewell.records.plan import PLAN, Chosen
from tunewell.runs.config import RunOptions, load_for_run
from tunewell.runs.loss_curve import curves_svg, line_of_run
from tunewell.runs.state import StoredRun
from tunewell.training.events import Listener
from tunewell.workflows.prepare import prepare
from tunewell.workflows.train import require_trainable, run_training
from tunewell.workflows.validate import validate

PICTURE = "curves.svg"
_MIN_FREE_BYTES = 64 << 20
_DATA_KEYS = ("data", "template", "packing", "model", "tokenizer")

Shown = Callable[[str], AbstractContextManager[Listener]]
"""Shows one run: takes its title, and yields a listener."""


@dataclass
class SweepRunner:
    """One sweep in this process."""

    spec: SweepSpec
    trials: list[Trial]
    folder: Path
    config: ConfigLike
    options: RunOptions
    shown: Shown
    corpora: dict[str, Path] = field(default_factory=dict)
    """Data settings -> corpus folder, once prepared."""
    failures: dict[str, Exception] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    threads: Chosen[int] | None = None
    """The fastest number of threads, once measured."""
    is_interrupted: bool = False
    trained: list[Trial] = field(default_factory=list[Trial])
    started: float = field(default_factory=time.monotonic)

    def run(self) -> SweepResult:
        """Check every trial, then run them. Raise UserError before the first run, or if all runs fail."""
        configs = [self.load(trial) for trial in self.trials]
        for trial, loaded in zip(self.trials, configs, strict=True):
            with _naming(trial):
                require_trainable(loaded, self.options)
        is_new = not (self.folder / SWEEP).exists()
        write_sweep(self.folder, self.spec, self.trials)
        try:
            self.prepare()
        except UserError:
            if is_new:  # the corrected command may use the folder
                (self.folder / SWEEP).unlink()
            raise
        # Only a frozen base model can be shared: full fine-tuning changes its weights.
        is_frozen = all(METHODS.entry(loaded.config.method.kind).is_adapter for loaded in configs)
        models = {loaded.seen(loaded.config.model or "") for loaded in configs}
        with sharing(frozenset(models if is_frozen else ())):
            self.train_all(self.trials)
            self.repeat(configs[0].config.seed)
        if self.failures and len(self.failures) == len(self.trials):
            raise next(iter(self.failures.values()))
        return self.finish()

    # The config and the corpus of a trial.

    def load(self, trial: Trial) -> LoadedConfig:
        """Load the config of a trial. Another seed keeps the corpus, so that all runs have the same held-out rows."""
        corpus = self.corpora.get(data_key(trial))
        # Without sources, the corpus is used as it is; with another seed, `prepare` would split the rows anew.
        keep_corpus = ["data.sources=[]"] if corpus is not None and "seed" in trial.settings else []
        return self._load(trial, [*trial.sets(), *as_sets(corpus=corpus), *keep_corpus])

    def _load(self, trial: Trial, sets: Sequence[str]) -> LoadedConfig:
        places = as_sets(run=self.run_of(trial))
        data = self.spec.data or None
        with _naming(trial):
            return load_for_run(
                self.config,
                [*self.spec.fixed, *self.spec.judged_with, *sets, *places],
                is_resuming=False,
                model=self.spec.model,
                data=data,
            )

    def prepare(self) -> None:
        """Prepare a corpus for each distinct data setting. Raise UserError if one has no held-out rows."""
        groups: dict[str, Trial] = {}
        for trial in self.trials:
            groups.setdefault(data_key(trial), trial)
        if len(groups) > 1:
            self.notes.append(f"{count(len(groups))} corpora: losses on different held-out rows compare only roughly")
        for number, (key, trial) in enumerate(groups.items(), start=1):
            sets = [f"{name}={value}" for name, value in trial.settings.items() if name != "seed"]
            if len(groups) > 1:
                sets += as_sets(corpus=self.folder / "corpora" / f"{number:02d}")
            loaded = self._load(trial, sets)
            with _naming(trial), self.shown("preparing the rows") as listener:
                num_held_out = prepare(loaded, progress=listener).manifest.held_out
            if not num_held_out:
                raise UserError("there are no held-out rows to compare the runs on", fix="set `data.held_out: 0.1`")
            self.corpora[key] = loaded.path(loaded.config.corpus)

    # Train.

    def train_all(self, trials: Sequence[Trial]) -> None:
        """Train or resume some trials. An error is recorded; the next trial may succeed."""
        for number, trial in enumerate(trials, start=1):
            if self.is_interrupted:
                return
            if self._is_done(trial) or not self._has_time(trial):
                continue
            free = shutil.disk_usage(self.folder).free
            if free < _MIN_FREE_BYTES:
                what = f"not enough disk space for the next run: {size_bytes(free)} are free"
                raise UserError(what, fix=self._resume_fix)
            self.failures.pop(trial.name, None)
            try:
                with self.shown(f"run {number} of {len(trials)}: {', '.join(trial.sets())}") as listener:
                    self.train(trial, listener)
            except Exception as error:
                if isinstance(error, OSError) and is_disk_full(error):
                    raise UserError("the disk is full", where=str(self.run_of(trial)), fix=self._resume_fix) from error
                self.failures[trial.name] = error
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()  # the next run has its own peak

    def train(self, trial: Trial, listener: Listener) -> None:
        """Train or resume one trial, or validate it if it was killed before its verdict."""
        run = self.run_of(trial)
        if StoredRun(run).outcome.get("status") == "finished":
            validate(run, options=ValidateOptions(allow_pickle=self.options.allow_pickle), progress=listener)
            return
        is_resuming = (run / PLAN).is_file()
        options = replace(self.options, is_resuming=is_resuming, measure_threads=self._measure_threads, is_alone=False)
        self.is_interrupted = run_training(self.load(trial), options, listener).signal is not None

    def _has_time(self, trial: Trial) -> bool:
        """Return True if a run fits into the rest of the budget, by its prediction and the time of the runs so far."""
        used, known = time.monotonic() - self.started, sum(one.seconds for one in self.trained)
        seconds = trial.seconds * (used / known if known else 0.0)
        if self.spec.budget is not None and used + seconds > self.spec.budget:
            self.notes.append(f"no time for {', '.join(trial.sets())}")
            return False
        self.trained.append(trial)
        return True

    def run_of(self, trial: Trial) -> Path:
        """Return the run folder of a trial."""
        return self.folder / trial.name

    def _is_done(self, trial: Trial) -> bool:
        run = StoredRun(self.run_of(trial))
        outcome = run.outcome
        if outcome.get("status") == "finished":
            return run.has_report or not self.load(trial).config.verdict.after_training
        return outcome.get("status") in ("stopped", "failed") and "was not saved" not in str(outcome.get("reason"))

    def _measure_threads(self, shapes: Sequence[Any]) -> Chosen[int]:
        """Measure the fastest number of threads once: all runs compute in the same way, and none waits again."""
        self.threads = self.threads or measure_threads(shapes)
        return self.threads

    def repeat(self, seed: int) -> None:
        """Train the two best settings with further seeds."""
        if self.spec.seeds < 2 or self.is_interrupted:
            return
        more = repetitions(self.trials, self.results(), range(seed, seed + self.spec.seeds))
        self.trials += [trial for trial in more if trial not in self.trials]
        write_sweep(self.folder, self.spec, self.trials)
        self.train_all(more)

    # The result.

    def results(self) -> list[TrialResult]:
        """Return the result of every trial so far."""
        failures = {name: f"{type(error).__name__}: {error}" for name, error in self.failures.items()}
        return [trial_result(trial, self.run_of(trial), failures.get(trial.name)) for trial in self.trials]

    def finish(self) -> SweepResult:
        """Name the best run, draw the curves, and write `sweep.json`."""
        result = conclude(self.folder, self.spec.alternatives, self.results(), self.notes)
        lines = [line_of_run(Path(one.run), one.name) for one in result.runs if one.steps]
        picture = curves_svg([line for line in lines if line.held_out], title="held-out loss")
        write_atomic(self.folder / PICTURE, picture)
        if self.is_interrupted:
            result = replace(result, is_interrupted=True, exit_code=130, next_command=self._resume_command)
        elif result.best is not None:
            best = [result.best, *(one for one in result.runs if one.is_complete and one != result.best)][:3]
            words = ["tunewell", "compare" if len(best) > 1 else "validate", *(one.run for one in best)]
            result = replace(result, next_command=shlex.join(words))
            if self.spec.budget is not None:
                result = conclude_budget(result, self.spec, self.trials)
        write_sweep(self.folder, self.spec, self.trials, result)
        return result

    @property
    def _resume_command(self) -> str:
        return f"tunewell sweep --resume --out {shlex.quote(str(self.folder))}"

    @property
    def _resume_fix(self) -> str:
        return f"free disk space, then go on with `{self._resume_command}`"


def data_key(trial: Trial) -> str:
    """Return the settings of a trial that change its corpus, as text. The seed does not: its runs share a corpus."""

    def changes_data(key: str) -> bool:
        path = resolve_alias(parse_key(key))
        return path[0] in _DATA_KEYS or path == ("method", "adapter")

    return json.dumps({key: value for key, value in trial.settings.items() if changes_data(key)}, sort_keys=True)


@contextmanager
def _naming(trial: Trial) -> Iterator[None]:
    """Add the settings of a trial to a UserError."""
    try:
        yield
    except UserError as error:
        others = [text for text in trial.sets() if text not in (error.where or "")]
        if not others:
            raise
        with_trial = f"with {', '.join(others)}"
        where = f"{error.where}; {with_trial}" if error.where else with_trial
        raise UserError(error.what, where=where, fix=error.fix) from error
