"""Options that several commands share, declared once."""

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="Config file; `tunewell.yaml` of this folder if not given.")
]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set any key of the config; may be repeated.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
