"""`tunewell models`: compare models for some rows on this machine."""

from typing import Annotated

import typer

from tunewell.cli.options import AsJson
from tunewell.cli.progress import shown_progress
from tunewell.cli.render import emit, json_text


def command(
    data: Annotated[
        str | None,
        typer.Argument(metavar="DATA", help="File, folder or glob of rows. Default: those of `tunewell.yaml`."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL", help="Compare only this model. Can be repeated."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Show which models suit your rows and this machine.

    Memory and time are computed for a first run as `tunewell init` configures it. Nothing is downloaded.
    """
    from tunewell.workflows.models import models

    with shown_progress() as progress:
        result = models(data, names=tuple(model or ()), progress=progress)
    if json:
        emit(json_text(result.as_json()))
    else:
        from tunewell.cli.screens.models import models_screen

        emit(models_screen(result))
