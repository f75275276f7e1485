"""A sweep: the alternatives of some settings, the runs that try them, and the comparison.

`sweep.json` in the sweep's folder has the alternatives and the runs; the state of a run is in its own folder, so a
sweep that was killed goes on from there. No torch.
"""

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.files import stable_json, write_atomic
from tunewell.core.redact import redact
from tunewell.core.units import count
from tunewell.records.base import Record, read_record
from tunewell.records.events import plain
from tunewell.runs.state import StoredRun

SWEEP = "sweep.json"
_MAX_RUNS = 1000
_SEED = "seed"
_NAME_PARTS = re.compile(r"[^A-Za-z0-9.+-]+")
# Two-sided 95% quantiles of Student's t by degrees of freedom.
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)

Settings = dict[str, str]
"""Key -> value, as text for `--set`."""


def without_seed(settings: Settings) -> Settings:
    """Return the settings without the seed: runs that have these in common are repetitions."""
    return {key: value for key, value in settings.items() if key != _SEED}


def split_alternatives(text: str) -> list[str]:
    """Split a value at its commas, but not inside brackets, braces or quotes: `8,32`, `[q_proj],[q_proj,v_proj]`."""
    parts, depth, quote, start = [], 0, "", 0
    for index, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:index].strip())
            start = index + 1
    return [*parts, text[start:].strip()]


def parse_sets(sets: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the `KEY=VALUE` with one value, and the alternatives of the others. Raises UserError for empty ones."""
    fixed: list[str] = []
    alternatives: dict[str, list[str]] = {}
    for text in sets:
        key, equals, value = text.partition("=")
        values = split_alternatives(value)
        if not equals or len(values) == 1:
            fixed.append(text)
            continue
        if "" in values:
            raise UserError(
                f"an alternative of `{key.strip()}` is empty", where=f"--set {text}", fix="remove one comma"
            )
        if key.strip() in alternatives:
            raise UserError(
                f"`{key.strip()}` has alternatives twice", where=f"--set {text}", fix="write all of them in one `--set`"
            )
        if len(set(values)) < len(values):
            raise UserError(
                f"an alternative of `{key.strip()}` is given twice", where=f"--set {text}", fix="remove one of them"
            )
        alternatives[key.strip()] = values
    return fixed, alternatives


@dataclass(frozen=True)
class Trial:
    """One run of a sweep."""

    name: str
    """The name of its folder."""
    settings: Settings
    seconds: float = 0.0
    """The predicted time; 0 if none was predicted."""

    def sets(self) -> list[str]:
        """Return the settings as values of `--set`."""
        return [f"{key}={value}" for key, value in self.settings.items()]


def make_trials(alternatives: Mapping[str, Sequence[str]]) -> list[Trial]:
    """Return a run for each combination of the alternatives."""
    number = math.prod(len(values) for values in alternatives.values())
    if not alternatives or number < 2:
        raise UserError(
            "a sweep needs a setting with several values",
            fix="separate them with commas: `--set train.learning_rate=1e-4,3e-4`",
        )
    if number > _MAX_RUNS:
        raise UserError(
            f"{count(number, 'combination')} are too many for one sweep",
            fix=f"give fewer values: a sweep has at most {count(_MAX_RUNS, 'run')}",
        )
    return name_trials([dict(zip(alternatives, own, strict=True)) for own in itertools.product(*alternatives.values())])


def name_trials(settings: Sequence[Settings]) -> list[Trial]:
    """Return a run for each of some settings."""
    return [Trial(_name(index, one), one) for index, one in enumerate(settings, start=1)]


def _name(number: int, settings: Settings) -> str:
    parts = [f"{key.rpartition('.')[2]}-{_NAME_PARTS.sub('_', value)}" for key, value in settings.items()]
    return "_".join([f"{number:02d}", *parts])[:80].rstrip("_.")


def repetitions(trials: Sequence[Trial], results: "Sequence[TrialResult]", seeds: Sequence[int]) -> list[Trial]:
    """Return the two best settings with further seeds."""
    found = []
    for group in rank_groups(results)[:2]:
        base = next(trial for trial in trials if without_seed(trial.settings) == group.settings)
        for seed in seeds[1:]:
            settings = group.settings | {_SEED: str(seed)}
            new = Trial(f"{base.name}_seed-{seed}"[:96], settings)
            found.append(next((trial for trial in trials if trial.settings == settings), new))
    return found


# The state of a sweep on disk.


@dataclass(frozen=True)
class SweepSpec:
    """What a sweep tries, as `sweep.json` stores it."""

    alternatives: dict[str, list[str]]
    fixed: list[str]
    """The other `--set`."""
    config: str | None = None
    model: str | None = None
    data: list[str] = field(default_factory=list)
    seeds: int = 1
    budget: float | None = None
    """Seconds for all runs; None without `--budget`."""
    folder: str = ""
    """The folder in which the command ran, from which relative paths start."""
    judged_with: list[str] = field(default_factory=list)
    """The settings of the runs of a budget by which they are judged on a slice, not on the held-out rows."""


def write_sweep(folder: Path, spec: SweepSpec, trials: Sequence[Trial], result: "SweepResult | None" = None) -> None:
    """Write `sweep.json` atomically, without secrets."""
    payload: dict[str, Any] = {"format": "tunewell-sweep", "format_version": 1, "spec": asdict(spec)}
    payload["runs"] = [asdict(trial) for trial in trials]
    if result is not None:
        payload["result"] = result.as_json()
    write_atomic(folder / SWEEP, stable_json(redact(payload)))


class SweepFile(Record):
    """What `sweep.json` says of a sweep that can be resumed."""

    format_version: int = 1
    spec: SweepSpec
    runs: list[Trial]


def read_sweep(folder: Path) -> tuple[SweepSpec, list[Trial]]:
    """Read `sweep.json`; raise UserError if it is missing, damaged or of a newer version."""
    path = folder / SWEEP
    if not path.is_file():
        fix = "start a new sweep in another folder with `--out`"
        raise UserError(f"there is no sweep in `{folder}`", fix=fix)
    file = read_record(path, SweepFile)
    return file.spec, file.runs


def require_same_sweep(folder: Path, spec: SweepSpec) -> list[Trial]:
    """Return the runs of the sweep in a folder; raise UserError if it tries something else."""
    known, trials = read_sweep(folder)
    before, now = (json.loads(json.dumps(redact(asdict(one)))) for one in (known, spec))
    for name in ("alternatives", "fixed", "config", "model", "data"):
        if before[name] != now[name]:
            raise UserError(
                f"the sweep in `{folder}` has other values of `{name}`",
                where=f"then {before[name]}, now {now[name]}",
                fix=f"resume it with `tunewell sweep --resume --out {folder}` alone, or choose another folder",
            )
    return trials


# Results.


@dataclass(frozen=True)
class TrialResult:
    """How one run of a sweep ended. Unknown values are None."""

    name: str
    run: str
    settings: Settings
    status: str
    held_out: float | None = None
    """The lowest held-out loss."""
    steps: int | None = None
    planned_steps: int | None = None
    verdict: str | None = None
    tokens_per_second: float | None = None
    note: str | None = None
    right: int | None = None
    judged: int = 0
    """Right answers on the slice of a sweep with a budget."""

    @property
    def is_complete(self) -> bool:
        """Whether the run took all its steps, so that it can be compared."""
        return self.status == "finished" and self.held_out is not None and math.isfinite(self.held_out)


def trial_result(trial: Trial, run: Path, failure: str | None = None) -> TrialResult:
    """Read the result of a run from its folder. `failure` is the error with which it ended."""
    if not run.is_dir():
        return TrialResult(trial.name, str(run), trial.settings, "failed" if failure else "not started", note=failure)
    found = StoredRun(run)
    return TrialResult(
        name=trial.name,
        run=str(run),
        settings=trial.settings,
        status="failed" if failure else found.status,
        held_out=found.held_out,
        steps=found.steps,
        planned_steps=found.planned_steps,
        verdict=found.verdict,
        tokens_per_second=found.tokens_per_second,
        note=failure or (found.note if found.status != "finished" else None),
    )


@dataclass(frozen=True)
class Group:
    """Runs with the same settings and different seeds."""

    settings: Settings
    losses: list[float]
    name: str

    @property
    def mean(self) -> float:
        return fmean(self.losses)


def rank_groups(results: Sequence[TrialResult]) -> list[Group]:
    """Return the settings of all complete runs, the lowest mean held-out loss first."""
    groups: dict[tuple[tuple[str, str], ...], Group] = {}
    for result in results:
        if result.is_complete and result.held_out is not None:
            settings = without_seed(result.settings)
            group = groups.setdefault(tuple(settings.items()), Group(settings, [], result.name))
            group.losses.append(result.held_out)
    return sorted(groups.values(), key=lambda group: group.mean)


@dataclass(frozen=True)
class SweepResult:
    """The result of a sweep: its runs, the lowest held-out loss first, and the best one."""

    folder: Path
    alternatives: dict[str, list[str]]
    runs: list[TrialResult]
    best: TrialResult | None
    margin: float | None
    """How much higher the mean loss of the second-best settings is; None if there are none."""
    interval: tuple[float, float] | None
    """95% interval of the margin over seeds; None with one seed."""
    conclusion: str
    notes: list[str] = field(default_factory=list)
    is_interrupted: bool = False
    exit_code: int = 0
    next_command: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the object that `sweep --json` prints."""
        return plain({**asdict(self), "folder": str(self.folder), "best": self.best and self.best.name})

    def __repr__(self) -> str:
        best = "None" if self.best is None else f"{self.best.name!r}, held_out={self.best.held_out}"
        return f"SweepResult(runs={len(self.runs)}, best={best})"

    def _repr_html_(self) -> str:
        from tunewell.core.html import result_table

        rows: list[tuple[str, object]] = []
        for run in self.runs:
            steps = "" if run.steps is None else f", {count(run.steps, 'step')}"
            loss = "-" if run.held_out is None else f"{run.held_out:.4f}"
            rows.append((run.name, f"{loss}, {run.verdict or run.status}{steps}"))
        return result_table([*rows, ("conclusion", self.conclusion)])


def conclude(
    folder: Path, alternatives: dict[str, list[str]], results: Sequence[TrialResult], notes: Sequence[str] = ()
) -> SweepResult:
    """Name the best run, its margin over the second-best settings, and whether the margin is more than noise."""
    ranked = rank_groups(results)
    ordered = sorted(
        results, key=lambda one: one.held_out if one.is_complete and one.held_out is not None else math.inf
    )
    best, margin, interval, conclusion = None, None, None, "no run was completed"
    if ranked:
        best = next(one for one in ordered if without_seed(one.settings) == ranked[0].settings)
        conclusion = "only one combination was trained to the end, so there is no margin"
    if len(ranked) > 1:
        first, second = ranked[:2]
        margin = second.mean - first.mean
        interval = margin_interval(first.losses, second.losses)
        conclusion = _conclusion(first, second, interval)
    exit_code = 0 if ranked else 1
    return SweepResult(
        folder, alternatives, ordered, best, margin, interval, conclusion, list(notes), exit_code=exit_code
    )


def _loss_key(loss: float | None) -> float:
    return loss if loss is not None and math.isfinite(loss) else math.inf


def margin_interval(first: Sequence[float], second: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95% interval of the difference of two means (Welch), or None with one value of either."""
    if len(first) < 2 or len(second) < 2:
        return None
    errors = [stdev(values) ** 2 / len(values) for values in (first, second)]
    difference, total = fmean(second) - fmean(first), sum(errors)
    if total == 0:
        return difference, difference
    freedom = total**2 / sum(error**2 / (len(v) - 1) for error, v in zip(errors, (first, second), strict=True))
    quantile = _T95[min(max(int(freedom), 1), len(_T95)) - 1]
    half = quantile * math.sqrt(total)
    return difference - half, difference + half


def _conclusion(first: Group, second: Group, interval: tuple[float, float] | None) -> str:
    margin = f"{second.mean - first.mean:.4f} lower than the second-best settings ({second.name})"
    if interval is None:
        return f"{margin}; one seed does not tell whether that is noise: `--seeds 3` repeats the two best"
    seeds = f"over {len(first.losses)} and {len(second.losses)} seeds"
    within = f"95% interval {interval[0]:.4f} to {interval[1]:.4f} {seeds}"
    return f"{margin}; {'more than noise' if interval[0] > 0 else 'within noise'} ({within})"
