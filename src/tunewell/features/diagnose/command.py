"""`tunewell diagnose`: name the failure in any trainer's log."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from tunewell.cli.options import Argument, AsJson, Option
from tunewell.cli.render import emit, json_text
from tunewell.core.errors import UserError


def command(
    sources: Annotated[
        list[str] | None,
        Argument(
            "A log, run, folder, notebook, state file or config; `-` reads stdin. Several files are one run.",
            "SOURCE...",
        ),
    ] = None,
    rows: Annotated[Path | None, Option("Rows (JSONL) to compare with the length limit of a config.", "FILE")] = None,
    with_: Annotated[
        list[str] | None,
        Option(
            "Check the keys of a config for this release, or for those `installed` here. Can be repeated.",
            "NAME==VERSION",
        ),
    ] = None,
    all_: Annotated[bool, Option("Show every finding in full.")] = False,
    json: AsJson = False,
) -> None:
    """Name the failure in the log of any trainer, with evidence, cause and fix.

    Exit codes: 0 healthy, 3 unknown or only warnings, 4 a failure is named, 2 nothing could be read.
    """
    from tunewell.cli.main import COMMANDS
    from tunewell.features.diagnose.screen import diagnosis_screen
    from tunewell.features.diagnose.workflow import diagnose

    if not sources:
        raise UserError(
            "there is nothing to diagnose", fix="`tunewell diagnose train.log`, or `... 2>&1 | tunewell diagnose -`"
        )
    if sources == ["-"] and sys.stdin.isatty():
        sys.stderr.write("paste the log, or describe the problem; end with Ctrl-D on an empty line\n")
    result = diagnose(sources, sys.stdin.buffer, rows=rows, releases=with_ or ())
    emit(json_text(result.as_json()) if json else diagnosis_screen(result, commands=dict(COMMANDS), is_full=all_))
    if result.exit_code:
        raise typer.Exit(result.exit_code)
