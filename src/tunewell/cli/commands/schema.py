"""`tunewell schema`: print the JSON Schema of the config."""

from typing import Annotated

from tunewell.cli.options import Option
from tunewell.cli.render import emit, json_text


def command(
    json: Annotated[bool, Option("No effect: the output is always JSON.")] = False,
) -> None:
    """Print the JSON Schema of `tunewell.yaml`, for editors.

    Save it with `tunewell schema > tunewell.schema.json`. Then start the config with
    `# yaml-language-server: $schema=tunewell.schema.json`.
    """
    from tunewell.config.explain import json_schema

    del json
    emit(json_text(json_schema()))
