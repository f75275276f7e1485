"""`tunewell plan`: predict memory, time and cost of a run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tunewell.cli.options import AsJson, ConfigOptions, DataPaths, Option, TrainedModel
from tunewell.cli.progress import shown_stages
from tunewell.cli.render import emit, hanging, json_text
from tunewell.cli.startup import clean_up_when_terminated
from tunewell.core.errors import UserError

if TYPE_CHECKING:
    from tunewell.config.load import LoadedConfig
    from tunewell.planning.result import PlanResult


def command(
    *,
    given: ConfigOptions,
    model: TrainedModel = None,
    data: DataPaths = None,
    no_measure: Annotated[
        bool, Option("Take no real steps: compute from the architecture, in about a second.")
    ] = False,
    gpu: Annotated[str | None, Option("Other GPU cards, separated by commas: `t4,4090,a100-80,h200`.", "CARDS")] = None,
    ram: Annotated[
        float | None, Option("Plan for a CPU with this RAM in GB. With `--gpu`: RAM of the GPU's machine.", "GB")
    ] = None,
    apply: Annotated[bool, Option("If it does not fit, write the mildest change that does into the config.")] = False,
    rung: Annotated[
        int | None, Option("With `--apply`: the number of another change in the list, from 1.", "N")
    ] = None,
    check: Annotated[str | None, Option("Show what was predicted for a run beside what it needed.", "RUN")] = None,
    json: AsJson = False,
) -> int:
    """Predict whether a run fits, how long it takes and what it costs.

    Exit codes: 0 it fits, 2 it does not.
    """
    if check is not None:
        emit(_checked(check, json=json))
        return 0
    from tunewell.workflows.plan import PlanOptions, plan

    if ram is not None and not 0.1 <= ram <= 100_000:
        raise UserError(f"`--ram {ram:g}` is not a size of main memory in GB", fix="like `--ram 16`")
    if rung is not None and not apply:
        raise UserError("`--rung` works only together with `--apply`")
    names = [name.strip() for name in (gpu or "").split(",") if name.strip()]
    if gpu is not None and not names:
        raise UserError("`--gpu` names no card", fix="like `--gpu t4,4090`")
    loaded = given.load(model=model, data=data)
    options = PlanOptions(not no_measure, names, None if ram is None else int(ram * 1e9))
    clean_up_when_terminated()
    with shown_stages() as progress:
        result = plan(loaded, options, progress=progress)
    if apply:
        emit(_applied(loaded, result, rung, json=json))
        return 0
    if json:
        emit(json_text(result.as_json()))
    else:
        from tunewell.cli.screens.plan import plan_screen
        from tunewell.config.edit import edited_text

        can_apply = result.chosen is not None and edited_text(loaded, result.chosen.changes) is not None
        train = given.train_command(model=model, data=data)
        emit(plan_screen(result, train=train, can_apply=can_apply))
    return result.exit_code


def _checked(run: str, *, json: bool) -> str:
    from tunewell.cli.screens.plan import check_screen
    from tunewell.records.rundir import read_outcome

    outcome = read_outcome(Path(run))
    predicted, measured = outcome.predicted, outcome.measured
    if predicted is None or measured is None:
        raise UserError(f"the run in `{run}` has no prediction", where=f"it was made by {outcome.made_by}")
    if json:
        return json_text({"predicted": predicted.model_dump(mode="json"), "measured": measured.model_dump(mode="json")})
    return check_screen(run, predicted, measured)


def _applied(loaded: "LoadedConfig", result: "PlanResult", number: int | None, *, json: bool) -> str:
    """Write a change of the ladder into the config, and return what was written."""
    from tunewell.config.edit import as_scalar, edit_config

    if not result.exit_code:
        return json_text({"fits": True, "changes": {}}) if json else "the run fits: nothing is changed"
    if number is not None and not 1 <= number <= len(result.ladder):
        raise UserError(f"there is no change {number}", fix=f"`tunewell plan` lists {len(result.ladder)} of them")
    chosen = result.chosen if number is None else result.ladder[number - 1]
    if chosen is None:
        raise UserError("no change makes the run fit", fix="`tunewell plan` lists what was tried, and what would fit")
    path = edit_config(loaded, chosen.changes)
    if json:
        return json_text({"fits": chosen.prediction.fits, "changes": chosen.changes, "config": str(path)})
    written = ", ".join(f"`{key}: {as_scalar(value)}`" for key, value in chosen.changes.items())
    fits = chosen.prediction.fits
    lines = [hanging("wrote ", f"{written} into `{path}`"), *([] if fits else ["note: the run still does not fit"])]
    return "\n".join([*lines, f"next: `tunewell {'train' if fits else 'plan'}`"])
