"""`tunewell serve`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunewell.cli.options import AsJson

if TYPE_CHECKING:
    from tunewell.workflows.serve import Ready


def command(
    place: Annotated[
        str | None,
        typer.Argument(metavar="PLACE", help="A run, an adapter or a model; the run of this folder if not given."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; any but this machine's own needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any that is free.")] = 8000,
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File with the token that clients must send; or set TUNEWELL_TOKEN."),
    ] = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option(metavar="ORIGIN", help="Web pages that may ask; may be repeated.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="What clients call the model, if not by its folder.")] = None,
    checkpoint: Annotated[str, typer.Option(help="Of a run: `best`, `last` or a step.")] = "best",
    base: Annotated[str | None, typer.Option(help="Model that an adapter was made from.")] = None,
    template: Annotated[str | None, typer.Option(help="Chat template, for a model that has none.")] = None,
    device: Annotated[str, typer.Option(help="Where to compute: `cpu`, `cuda`, `cuda:1`, `mps`.")] = "auto",
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read weights from a `.pt` file; only from people you trust.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Serve a model to programs that speak OpenAI's API."""
    import sys

    from tunewell.cli.render import emit
    from tunewell.cli.screens.chat import loading

    with loading("loading the model"):
        # Seconds go by before torch is there: not at a prompt that says nothing.
        from tunewell.runs.resolve import resolve_model
        from tunewell.workflows.serve import Door, open_server

        serving = open_server(
            resolve_model(place, checkpoint=checkpoint, base=base, template=template),
            door=Door(host, port, token_file, allow_origin or ()),
            device=device,
            name=name,
            allow_pickle=allow_pickle,
        )
    emit(as_line(serving.ready) if json else screen(serving.ready))
    # Whoever waits for these words may read them from a pipe, and the command does not end.
    sys.stdout.flush()
    if code := serving.run():
        raise typer.Exit(code)


def as_line(ready: "Ready") -> str:
    """Spell what is served as JSON on one line, so that a program can read it while the command runs on."""
    import json
    from dataclasses import asdict

    return json.dumps(asdict(ready))


def screen(ready: "Ready") -> str:
    """Say what is served, where, and how to try it."""
    from tunewell.cli.render import table
    from tunewell.core.units import count

    why = f", {ready.because}" if ready.because else ""
    by = f" by {ready.computed_by}" if ready.computed_by else ""
    token = "needed, as the API key" if ready.needs_token else "none; only this machine can ask"
    rows = [
        ["serving", f"{ready.subject}{why}"],
        ["computed", f"on {ready.device} in {ready.precision}{by}, {count(ready.context_length)} tokens of context"],
        ["listens", f"on {ready.listens_on}"],
        ["base URL", ready.url],
        ["model", ready.model],
        ["token", token],
        *(["note", note] for note in ready.notes),
    ]
    return "\n".join(
        [table(rows), "", "try it:", *(f"  {line}".rstrip() for line in examples(ready)), "", "Ctrl-C ends it"]
    )


def examples(ready: "Ready") -> list[str]:
    """Give a line for a shell and some for Python that ask the model something."""
    import json
    import shlex

    body = json.dumps({"model": ready.model, "messages": [{"role": "user", "content": "Hello"}]})
    key = '-H "Authorization: Bearer $TUNEWELL_TOKEN" ' if ready.needs_token else ""
    api_key = 'os.environ["TUNEWELL_TOKEN"]' if ready.needs_token else '"none"'
    imports = "import os; from openai import OpenAI" if ready.needs_token else "from openai import OpenAI"
    name = json.dumps(ready.model)
    return [
        f"curl {ready.url}/chat/completions {key}-H 'Content-Type: application/json' -d {shlex.quote(body)}",
        "",
        imports,
        f'client = OpenAI(base_url="{ready.url}", api_key={api_key})',
        'messages = [{"role": "user", "content": "Hello"}]',
        f"print(client.chat.completions.create(model={name}, messages=messages).choices[0].message.content)",
    ]
