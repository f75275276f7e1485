"""`tunewell sweep`: train with every combination of some settings, and name the best run."""

import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any

import typer

from tunewell.cli.options import AllowPickle, AsJson, ConfigFile, DataPaths, Option, TrainedModel
from tunewell.cli.render import emit, json_text, one_line

_SET = "Set a config key; commas separate alternatives (`8,32`), brackets enclose lists (`[a,b]`). Can be repeated."


def command(
    config: ConfigFile = None,
    set_: Annotated[list[str] | None, Option(_SET, "KEY=A,B")] = None,
    model: TrainedModel = None,
    data: DataPaths = None,
    out: Annotated[Path, Option("Folder to write the runs to.", "FOLDER")] = Path("sweep"),
    seeds: Annotated[int, Option("Train the two best settings with this many seeds.", "N")] = 1,
    budget: Annotated[str | None, Option("Find the best settings within a time, like `10m`.", "TIME")] = None,
    resume: Annotated[bool, Option("Resume the sweep in the `--out` folder.")] = False,
    no_validate: Annotated[bool, Option("Do not test the models.")] = False,
    *,
    allow_pickle: AllowPickle,
    json: AsJson = False,
) -> None:
    """Train with every combination of some settings, and name the best run.

    With `--budget 10m`, settings near the recommended ones are tried, as many as the time allows.

    Example: tunewell sweep --set train.learning_rate=1e-4,3e-4,1e-3 --set method.rank=8,32
    """
    from tunewell.cli.screens.training import shown_training
    from tunewell.cli.startup import import_libraries
    from tunewell.features.sweep.sweep import make_trials, parse_sets

    sets = [*(set_ or ()), *(["verdict.after_training=false"] if no_validate else [])]
    if not resume and not budget:
        make_trials(parse_sets(sets)[1])  # errors before torch is imported

    def shown(title: str) -> AbstractContextManager[Any]:
        sys.stderr.write(f"{one_line(title)}\n")
        return shown_training()

    with shown_training() as listener:
        import_libraries(listener, device="auto")
    from tunewell.features.sweep.screen import sweep_screen
    from tunewell.features.sweep.workflow import SweepOptions, sweep

    options = SweepOptions(
        out=out, seeds=seeds, budget=budget, is_resuming=resume, allow_pickle=allow_pickle, owns_process=True
    )
    result = sweep(config, sets=sets, model=model, data=data, options=options, shown=shown)
    emit(json_text(result.as_json()) if json else sweep_screen(result))
    if result.exit_code:
        raise typer.Exit(result.exit_code)
