"""`tunewell hello`: a toy command."""

from typing import Annotated

import typer


def command(name: Annotated[str, typer.Argument(help="Who is greeted.")] = "world") -> None:
    """Print a greeting."""
    from tunewell.cli.render import emit

    emit(f"hello {name}")
