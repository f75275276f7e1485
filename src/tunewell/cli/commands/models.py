"""`tunewell models`: compare models for some rows on this machine."""

from typing import Annotated

from tunewell.cli.options import Argument, AsJson, Option
from tunewell.cli.progress import shown_progress
from tunewell.cli.render import emit, json_text


def command(
    data: Annotated[
        str | None, Argument("File, folder or glob of rows. Default: those of `tunewell.yaml`.", "DATA")
    ] = None,
    model: Annotated[list[str] | None, Option("Compare only this model. Can be repeated.", "MODEL")] = None,
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
