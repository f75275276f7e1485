"""`tunewell profile`: show where the time of a step goes, and what would make it faster."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tunewell.cli.options import Argument, AsJson, ConfigFile, DataPaths, Option, RunDevice, Sets, TrainedModel
from tunewell.cli.progress import shown_stages
from tunewell.cli.render import emit, json_text
from tunewell.cli.startup import clean_up_when_terminated
from tunewell.core.errors import UserError

if TYPE_CHECKING:
    from tunewell.config.load import LoadedConfig

_STEPS = "Measure this many steps of the config (of RUN's, if RUN is given). Nothing is kept."
_APPLY = "Try the recommended setting, and print both results. The config is not changed."
_DEFAULT_STEPS = 20
_MIN_STEPS = 3


def command(
    run: Annotated[Path | None, Argument("A finished run. Default: this folder's run.", "RUN")] = None,
    steps: Annotated[int | None, Option(_STEPS, "N")] = None,
    apply: Annotated[bool, Option(_APPLY)] = False,
    config: ConfigFile = None,
    set_: Sets = None,
    model: TrainedModel = None,
    data: DataPaths = None,
    device: RunDevice = None,
    enable_fault_injection: Annotated[bool, Option(hidden=True)] = False,
    json: AsJson = False,
) -> None:
    """Show where the time of a training step goes, and the setting that would make it faster."""
    from tunewell.config.load import as_sets
    from tunewell.features.profile.bottlenecks import ProfileResult, find_bottlenecks
    from tunewell.features.profile.screen import profile_screen
    from tunewell.features.profile.workflow import profile_config

    is_live = apply or any(given is not None for given in (steps, config, model, data))
    if steps is not None and steps < _MIN_STEPS:
        raise UserError(f"`--steps {steps}` is too few: the minimum is {_MIN_STEPS}")
    if not is_live:
        from tunewell.features.profile.finished import read_profile

        found = read_profile(_find_run(run))
        result = ProfileResult(found, find_bottlenecks(found))
        emit(json_text(result.as_json()) if json else profile_screen(result))
        return

    def load(trial: str | None) -> "LoadedConfig":
        return _load(run, config, [*as_sets(device=device), *(set_ or ())], model=model, data=data, trial=trial)

    clean_up_when_terminated()
    with shown_stages() as progress:
        result = profile_config(
            load,
            steps or _DEFAULT_STEPS,
            applies=apply,
            allow_faults=enable_fault_injection,
            progress=progress,
        )
    emit(json_text(result.as_json()) if json else profile_screen(result))


def _find_run(run: Path | None) -> Path:
    from tunewell.config.load import load_config
    from tunewell.records.plan import PLAN

    steps = f"`tunewell profile --steps {_DEFAULT_STEPS}` measures some steps of this folder's config"
    if run is None:
        loaded = load_config()
        run = loaded.path(loaded.config.run)
        if not (run / PLAN).is_file():
            raise UserError(
                "there is no run in this folder", where=f"expected `{run / PLAN}`", fix=f"name a run; {steps}"
            )
    if not (run / PLAN).is_file():
        raise UserError(f"`{run}` is not a run", where=f"expected `{run / PLAN}`", fix=steps)
    return run


def _load(
    run: Path | None,
    config: Path | None,
    sets: list[str],
    *,
    model: str | None,
    data: list[str] | None,
    trial: str | None,
) -> "LoadedConfig":
    """Load the config of the run, or that of this folder, with the setting that is tried."""
    from tunewell.records.rundir import RUN_CONFIG
    from tunewell.runs.config import load_for_run, require_training_data

    if run is not None:
        config = _find_run(run) / RUN_CONFIG
    changed = [*sets, *([trial] if trial else [])]
    loaded = load_for_run(config, changed, is_resuming=False, model=model, data=data)
    require_training_data(loaded, is_resuming=False)
    return loaded
