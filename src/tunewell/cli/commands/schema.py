"""`tunewell schema`."""

from typing import Annotated

import typer


def command(
    json: Annotated[bool, typer.Option("--json", help="Changes nothing: a schema is JSON.")] = False,
) -> None:
    """Print the JSON Schema of `tunewell.yaml`, with which an editor completes and checks it.

    Save it with `tunewell schema > tunewell.schema.json` and begin the config with
    `# yaml-language-server: $schema=tunewell.schema.json`.
    """
    from tunewell.cli.render import emit_json
    from tunewell.config.explain import json_schema

    del json
    emit_json(json_schema())
