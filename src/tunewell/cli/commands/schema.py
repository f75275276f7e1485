"""`tunewell schema`: print the JSON Schema of the config."""

from typing import Annotated

import typer


def command(
    json: Annotated[bool, typer.Option("--json", help="No effect: the output is always JSON.")] = False,
) -> None:
    """Print the JSON Schema of `tunewell.yaml`, for editors.

    Save it with `tunewell schema > tunewell.schema.json`. Then start the config with
    `# yaml-language-server: $schema=tunewell.schema.json`.
    """
    from tunewell.cli.render import emit_json
    from tunewell.config.explain import json_schema

    del json
    emit_json(json_schema())
