"""`tunewell sweep`: train with every combination of some settings, and name the best run."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from tunewell.cli.options import AllowPickle, AsJson, ConfigFile, DataPaths
from tunewell.cli.render import emit, json_text, one_line
from tunewell.core.progress import Progress

_SET = "Set a config key; commas separate alternatives (`8,32`), brackets enclose lists (`[a,b]`). Can be repeated."


def command(
    config: ConfigFile = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=A,B", help=_SET)] = None,
    model: Annotated[str | None, typer.Option(metavar="MODEL", help="Model to train.")] = None,
    data: DataPaths = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder to write the runs to.")] = Path("sweep"),
    seeds: Annotated[int, typer.Option(metavar="N", help="Train the two best settings with this many seeds.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the sweep in the `--out` folder.")] = False,
    no_validate: Annotated[bool, typer.Option("--no-validate", help="Do not test the models.")] = False,
    allow_pickle: AllowPickle = False,
    json: AsJson = False,
) -> None:
    """Train with every combination of some settings, and name the best run.

    Example: tunewell sweep --set train.learning_rate=1e-4,3e-4,1e-3 --set method.rank=8,32
    """
    from tunewell.cli.screens.training import shown_training
    from tunewell.cli.startup import import_libraries
    from tunewell.features.sweep.sweep import make_trials, parse_sets

    sets = [*(set_ or ()), *(["verdict.after_training=false"] if no_validate else [])]
    if not resume:
        make_trials(parse_sets(sets)[1])  # errors before torch is imported

    @contextmanager
    def shown(title: str) -> Iterator[Any]:
        sys.stderr.write(f"{one_line(title)}\n")
        with shown_training() as listener:
            yield listener

    with shown_training() as listener:
        listener(Progress("importing torch"))
        import_libraries(device="auto")
    from tunewell.features.sweep.screen import sweep_screen
    from tunewell.features.sweep.workflow import SweepOptions, sweep

    options = SweepOptions(out=out, seeds=seeds, is_resuming=resume, allow_pickle=allow_pickle, owns_process=True)
    result = sweep(config, sets=sets, model=model, data=data, options=options, shown=shown)
    emit(json_text(result.as_json()) if json else sweep_screen(result))
    if result.exit_code:
        raise typer.Exit(result.exit_code)
