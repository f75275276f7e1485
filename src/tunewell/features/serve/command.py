"""`tunewell serve`: serve a model with an OpenAI-compatible chat API."""

import json as json_module
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunewell.cli.options import AllowPickle, AsJson, BaseModel, Checkpoint, Device, IndexOption, ModelArgument, Option
from tunewell.cli.render import emit, folded_table
from tunewell.cli.screens.chat import loading
from tunewell.core.options import WeightsOptions
from tunewell.core.units import count

if TYPE_CHECKING:
    from tunewell.features.serve.workflow import ServerInfo


def command(
    model: ModelArgument = None,
    host: Annotated[str, Option("Address to listen on. A public address needs a token.", "ADDRESS")] = "127.0.0.1",
    port: Annotated[int, Option("Port to listen on. 0 chooses a free port.", "N", min=0, max=65535)] = 8000,
    token_file: Annotated[
        Path | None, Option("File with the token that clients must send. Or set TUNEWELL_TOKEN.", "FILE")
    ] = None,
    allow_origin: Annotated[
        list[str] | None, Option("Web origin that may send requests. Can be repeated.", "ORIGIN")
    ] = None,
    idle_minutes: Annotated[
        float | None, Option("End after this time without a request.", "MINUTES", min=0.01, is_rare=True)
    ] = None,
    name: Annotated[str | None, Option("Name of the model in the API. Default: its folder.", "NAME")] = None,
    index: IndexOption = None,
    checkpoint: Checkpoint = "best",
    base: BaseModel = None,
    template: Annotated[str | None, Option("Chat template, for a model without one.", "NAME")] = None,
    device: Device = "auto",
    *,
    allow_pickle: AllowPickle,
    json: AsJson = False,
) -> None:
    """Serve a model over OpenAI's chat API."""
    from tunewell.runs.resolve import resolve_model

    # Whatever is wrong with the model's name is reported before torch is imported.
    ref = resolve_model(model, checkpoint=checkpoint, base=base, template=template)
    with loading("loading the model"):
        # Importing torch takes seconds, so the status line is shown first.
        from tunewell.features.serve.workflow import ListenOptions, open_server

        server = open_server(
            ref,
            options=ListenOptions(host, port, token_file, allow_origin or (), idle_minutes),
            device=device,
            name=name,
            index=index,
            weights=WeightsOptions(allow_pickle=allow_pickle),
        )
    # On one line, so that a program can read it from a pipe while the server runs.
    emit(json_module.dumps(asdict(server.info)) if json else screen(server.info))
    sys.stdout.flush()
    if code := server.run():
        raise typer.Exit(code)


def screen(info: "ServerInfo") -> str:
    """Return the screen: the served model, its address and example requests."""
    reason = f", {info.because}" if info.because else ""
    runtime = f" with {info.computed_by}" if info.computed_by else ""
    token = "required, as the API key" if info.needs_token else "none; only this machine can connect"
    rows = [
        ["serving", f"{info.subject}{reason}"],
        ["runs on", f"{info.device} in {info.precision}{runtime}, context of {count(info.context_length)} tokens"],
        ["listens on", info.listens_on],
        ["base URL", info.url],
        ["model", info.model],
        ["token", token],
        *([["answers from", f"{info.answers_from}; replies name them in `sources`"]] if info.answers_from else []),
        *(["note", note] for note in info.notes),
    ]
    # Not indented, so that the lines can be pasted, also into Python.
    return "\n".join([folded_table(rows), "", "try it:", "", *examples(info), "", "Ctrl-C stops the server"])


def examples(info: "ServerInfo") -> list[str]:
    """Return example requests as a curl command and as Python code, in short lines."""
    body = json_module.dumps({"model": info.model, "messages": [{"role": "user", "content": "Hello"}]})
    body = body.replace(', "messages": ', ',\n  "messages": ')
    key = ['  -H "Authorization: Bearer $TUNEWELL_TOKEN" \\'] if info.needs_token else []
    api_key = 'os.environ["TUNEWELL_TOKEN"]' if info.needs_token else '"none"'
    imports = "import os; from openai import OpenAI" if info.needs_token else "from openai import OpenAI"
    name = json_module.dumps(info.model)
    return [
        f"curl {info.url}/chat/completions \\",
        *key,
        "  -H 'Content-Type: application/json' \\",
        *f"  -d {shlex.quote(body)}".splitlines(),
        "",
        imports,
        "client = OpenAI(",
        f'    base_url="{info.url}",',
        f"    api_key={api_key},",
        ")",
        "reply = client.chat.completions.create(",
        f"    model={name},",
        '    messages=[{"role": "user", "content": "Hello"}],',
        ")",
        "print(reply.choices[0].message.content)",
    ]
