"""`tunewell doctor`: find what is broken in this environment, with the commands that fix it."""

from typing import Annotated

import typer

from tunewell.cli.options import AsJson, ConfigFile, Option
from tunewell.cli.progress import shown_stages
from tunewell.cli.render import emit, json_text
from tunewell.features.doctor.screen import doctor_screen, known_good_screen


def command(
    config: ConfigFile = None,
    model: Annotated[str | None, Option("Model whose files are checked.", "MODEL")] = None,
    python: Annotated[str | None, Option("Check the packages of another Python interpreter.", "PATH")] = None,
    fast: Annotated[bool, Option("Import nothing and do not ask nvidia-smi.")] = False,
    fix: Annotated[bool, Option("Print one script with all fixes. Nothing is run.")] = False,
    known_good: Annotated[str | None, Option("Print versions that work together, e.g. for `trl`.", "TOOL")] = None,
    json: AsJson = False,
) -> None:
    """Find what is broken in this environment, and how to fix it.

    Checks Python, packages, versions, GPU driver, disks and model files. Works if torch is missing or broken. Exit
    codes: 0 nothing found, 3 warnings, 4 broken.
    """
    if known_good is not None:
        emit(known_good_screen(known_good, as_json=json))
        return
    from tunewell.features.doctor.workflow import doctor

    with shown_stages() as progress:
        found = doctor(config=config, model=model, python=python, is_fast=fast, progress=progress)
    if json:
        emit(json_text(found.as_json() | ({"script": found.fix_script()} if fix else {})))
    else:
        emit(found.fix_script() if fix else doctor_screen(found))
    if found.exit_code:
        raise typer.Exit(found.exit_code)
