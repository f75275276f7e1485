"""`tunewell migrate`: turn the config of another tool into `tunewell.yaml`."""

from pathlib import Path
from typing import Annotated

from tunewell.cli.options import Argument, AsJson, Option
from tunewell.cli.render import emit, json_text

EXIT_LOST = 3


def command(
    files: Annotated[
        list[Path],
        Argument("Config, script, notebook, shell script or job; and files that belong to it, like rows.", "FILE"),
    ],
    out: Annotated[Path | None, Option("Config file to write. Default: `tunewell.yaml`.", "FILE")] = None,
    model: Annotated[str | None, Option("Model to train, in place of that of the source.", "MODEL")] = None,
    processes: Annotated[
        int | None,
        Option("Number of processes (GPUs) that the source trains with. Default: read from it, or 1.", "N", min=1),
    ] = None,
    all: Annotated[bool, Option("Show keys that set nothing too.")] = False,
    force: Annotated[bool, Option("Overwrite an existing config.")] = False,
    json: AsJson = False,
) -> int:
    """Write a config for a training of Axolotl, LLaMA-Factory, TRL, Unsloth, transformers or OpenAI.

    A ledger lists every key: kept, translated, not needed here, or lost. No code is run.
    Exit codes: 0 nothing is lost, 3 something is.
    """
    from tunewell.features.migrate.screen import migration_screen
    from tunewell.features.migrate.workflow import migrate

    result = migrate(files, out=out, model=model, processes=processes, is_overwriting=force)
    emit(json_text(result.as_json()) if json else migration_screen(result, shows_all=all))
    return EXIT_LOST if result.of("lost") else 0
