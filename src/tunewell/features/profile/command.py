"""`tunewell profile`: show where the time of a step goes, and what would make it faster."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunewell.cli.options import AsJson, ConfigFile, DataPaths, Sets
from tunewell.cli.render import emit, json_text
from tunewell.cli.startup import clean_up_when_terminated
from tunewell.core.errors import UserError
from tunewell.core.progress import Progress

if TYPE_CHECKING:
    from tunewell.config.load import LoadedConfig
    from tunewell.features.profile.workflow import Job

_RUN = "A finished run. Default: this folder's run."
_STEPS = "Measure this many steps of the config (of RUN's, if RUN is given). Nothing is kept."
_APPLY = "Try the recommended setting, and print both results. The config is not changed."
_DEFAULT_STEPS = 20
_MIN_STEPS = 3


def command(
    context: typer.Context,
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="A finished run. Default: this folder's run.")
    ] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", help=_STEPS)] = None,
    apply: Annotated[bool, typer.Option("--apply", help=_APPLY)] = False,
    config: ConfigFile = None,
    set_: Sets = None,
    model: Annotated[str | None, typer.Option(metavar="MODEL", help="Model to train.")] = None,
    data: DataPaths = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="Device: `cpu`, `cuda`, `cuda:1` or `mps`.")
    ] = None,
    enable_fault_injection: Annotated[bool, typer.Option("--enable-fault-injection", hidden=True)] = False,
    child: Annotated[Path | None, typer.Option("--child", hidden=True)] = None,
    copies: Annotated[Path | None, typer.Option("--copies", hidden=True)] = None,
    try_: Annotated[str | None, typer.Option("--try", hidden=True)] = None,
    json: AsJson = False,
) -> None:
    """Show where the time of a training step goes, and the setting that would make it faster."""
    from tunewell.features.profile.bottlenecks import ProfileResult, find_bottlenecks
    from tunewell.features.profile.screen import profile_screen
    from tunewell.features.profile.workflow import ChildFailed, Job, profile_config

    is_live = apply or any(given is not None for given in (steps, config, model, data))
    if steps is not None and steps < _MIN_STEPS:
        raise UserError(f"`--steps {steps}` is too few: the minimum is {_MIN_STEPS}")
    if not is_live:
        from tunewell.features.profile.finished import read_profile

        found = read_profile(_find_run(run))
        result = ProfileResult(found, find_bottlenecks(found))
        emit(json_text(result.as_json()) if json else profile_screen(result))
        return

    loaded = _load(run, config, set_, model=model, data=data, device=device, trial=try_)
    if child is not None:
        assert copies is not None
        is_trying_threads = (try_ or "").startswith("train.threads=")
        job = Job(child, copies, steps or _DEFAULT_STEPS, keeps_waits=is_trying_threads)
        _measure(loaded, job, allow_faults=enable_fault_injection)
        return
    clean_up_when_terminated()
    try:
        result = profile_config(loaded, context.obj, applies=apply)
    except ChildFailed as failed:
        raise typer.Exit(failed.code) from None
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
    sets: list[str] | None,
    *,
    model: str | None,
    data: list[str] | None,
    device: str | None,
    trial: str | None,
) -> "LoadedConfig":
    """Load the config of the run, or that of this folder, with the setting that is tried."""
    from tunewell.config.load import as_sets
    from tunewell.records.rundir import RUN_CONFIG
    from tunewell.runs.config import load_for_run, require_training_data

    if run is not None:
        config = _find_run(run) / RUN_CONFIG
    changed = [*as_sets(device=device), *(sets or ()), *([trial] if trial else [])]
    if trial and trial.startswith("corpus="):
        changed.append("data.sources=[]")  # the copy is complete and must not be prepared again
        data = None
    loaded = load_for_run(config, changed, is_resuming=False, model=model, data=data)
    require_training_data(loaded, is_resuming=False)
    return loaded


def _measure(loaded: "LoadedConfig", job: "Job", *, allow_faults: bool) -> None:
    """Measure in this process, the child of another `tunewell profile`."""
    from tunewell.cli.progress import shown_stages
    from tunewell.cli.startup import import_libraries

    with shown_stages() as progress:
        progress(Progress("importing torch"))
        import_libraries(device=loaded.config.device)
        from tunewell.features.profile.workflow import measure
        from tunewell.runs.config import RunOptions

        options = RunOptions(owns_process=True, faults=os.environ.get("TUNEWELL_FAULTS"), allow_faults=allow_faults)
        measure(loaded, options, job, progress)
