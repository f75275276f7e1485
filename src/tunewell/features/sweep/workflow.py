"""`tunewell sweep`: train with every combination of some settings, in one process, and name the best."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tunewell.config.load import ConfigLike
from tunewell.core.errors import UserError
from tunewell.core.files import FolderLock, make_private, require_output_path
from tunewell.core.launcher import world_size
from tunewell.core.options import WeightsOptions
from tunewell.features.sweep.budget import budgeted, parse_budget
from tunewell.features.sweep.runner import Shown, SweepRunner
from tunewell.features.sweep.sweep import (
    SWEEP,
    SweepResult,
    SweepSpec,
    make_trials,
    parse_sets,
    read_sweep,
    require_same_sweep,
)
from tunewell.records.rundir import LOCK
from tunewell.runs.config import RunOptions, load_for_run, with_start


@dataclass(frozen=True, kw_only=True)
class SweepOptions(WeightsOptions):
    """Options of a sweep that are not settings of its runs."""

    out: Path = Path("sweep")
    seeds: int = 1
    """The two best settings are trained with this many seeds."""
    budget: str | None = None
    """A time like `10m`, within which settings near the recommended ones are tried."""
    is_resuming: bool = False
    owns_process: bool = False
    """True on the command line, as in RunOptions."""


def sweep(
    config: ConfigLike = None,
    *,
    sets: Sequence[str] = (),
    model: str | None = None,
    data: Sequence[str] | None = None,
    options: SweepOptions,
    shown: Shown,
) -> SweepResult:
    """Train with every combination of the alternatives in `sets`, and compare the held-out losses.

    Raises UserError before the first run for invalid alternatives, rows without held-out ones, and a folder in use.
    """
    if world_size() > 1:
        raise UserError("a sweep trains in one process", fix="start it without torchrun")
    if options.seeds < 1:
        raise UserError(f"`--seeds {options.seeds}` is not a number of seeds", fix="use at least 1")
    out = options.out.expanduser()
    fixed, alternatives = parse_sets(sets)
    budget = parse_budget(options.budget) if options.budget else None
    if budget and (alternatives or options.seeds > 1):
        raise UserError(
            "`--budget` chooses the settings and the seed itself", fix="leave out alternatives and `--seeds`"
        )
    name = str(config) if isinstance(config, str | Path) else None
    spec = SweepSpec(alternatives, fixed, name, model, list(data or ()), options.seeds, budget, str(Path.cwd()))
    if options.is_resuming and not alternatives:
        stored = _stored_spec(out)
        spec = replace(stored, seeds=max(stored.seeds, options.seeds))
        config = spec.config if config is None else config
    trials = [] if options.is_resuming or budget else make_trials(spec.alternatives)
    run_options = RunOptions(allow_pickle=options.allow_pickle, owns_process=options.owns_process)
    with _locked(out, is_resuming=options.is_resuming):
        if options.is_resuming:
            trials = require_same_sweep(out, spec)
        elif budget:
            loaded = load_for_run(config, fixed, is_resuming=False, model=model, data=data)
            with shown("preparing the rows") as listener:
                spec, trials = budgeted(spec, with_start(loaded)[0], out, listener)
        return SweepRunner(spec, trials, out, config, run_options, shown).run()


def _stored_spec(out: Path) -> SweepSpec:
    spec, _ = read_sweep(out)
    if spec.folder != str(Path.cwd()):
        raise UserError(
            "the sweep was started in another folder", where=spec.folder, fix="run the command in that folder"
        )
    return spec


def _locked(out: Path, *, is_resuming: bool) -> FolderLock:
    """Create and lock the folder of a sweep. Raise UserError if it has other files, or another sweep runs in it."""
    require_output_path(out)
    if (out / SWEEP).exists() and not is_resuming:
        fix = f"resume it with `tunewell sweep --resume --out {shlex.quote(str(out))}`, or choose another `--out`"
        raise UserError(f"`{out}` already contains a sweep", fix=fix)
    if out.is_dir() and not (out / SWEEP).exists() and {path.name for path in out.iterdir()} - {LOCK}:
        raise UserError(f"the folder `{out}` is not empty", fix="choose another folder with `--out`")
    try:
        make_private(out)
    except OSError as error:
        raise UserError(
            f"the folder `{out}` cannot be written: {error.strerror}", fix="choose another `--out`"
        ) from error
    return FolderLock.take(out / LOCK, doing=f"sweeping in `{out}`")
