"""`tunewell export`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunewell.cli.options import AsJson, Sets

if TYPE_CHECKING:
    from tunewell.workflows.export import Exported


def command(
    place: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="A run, an adapter or a model; by default the run of the config here."),
    ] = None,
    to: Annotated[
        str | None, typer.Option(metavar="KINDS", help="`adapter`, `merged`, `gguf`, `ollama`, by commas.")
    ] = None,
    gguf: Annotated[
        str | None, typer.Option(metavar="KINDS", help="`f32`, `f16`, `bf16`, `q8_0`, `q6_k`, `q5_k_m`, `q4_k_m`.")
    ] = None,
    precision: Annotated[str | None, typer.Option(help="Of merged weights: `bf16`, `fp16` or `fp32`.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write; by default `export` in the run's.")] = None,
    checkpoint: Annotated[str, typer.Option(help="`best` by held-out loss, `last`, or a step.")] = "best",
    base: Annotated[str | None, typer.Option(help="What it was made from, where that is not written there.")] = None,
    name: Annotated[str | None, typer.Option(help="What Ollama is to call it; by default the run's name.")] = None,
    no_create: Annotated[bool, typer.Option("--no-create", help="Do not call `ollama create`.")] = False,
    set_: Sets = None,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read weights from a `.pt` file; only from people you trust.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Make an adapter, merged weights, GGUF files or an Ollama model of a run, and prove each. Exit code 4 if not."""
    from tunewell.cli.progress import shown_stages
    from tunewell.cli.render import emit, emit_json
    from tunewell.cli.screens.export import parity_screen
    from tunewell.core.progress import Progress
    from tunewell.export.request import ExportOptions

    order = ExportOptions(
        to=() if to is None else to,
        out=out,
        precision=precision,
        gguf=() if gguf is None else gguf,
        checkpoint=checkpoint,
        base=base,
        name=name,
        sets=set_ or (),
        allow_pickle=allow_pickle,
        creates=not no_create,
    ).checked()
    with shown_stages() as progress:
        progress(Progress("starting torch"))
        from tunewell.workflows.export import export

        done = export(place, order=order, progress=progress, announce=announce)
    if json:
        emit_json(done.as_json())
    else:
        emit(f"{parity_screen(done.parity)}\n{closing(done)}")
    if done.exit_code:
        raise typer.Exit(done.exit_code)


def closing(done: "Exported") -> str:
    """Say what was made and what to do next."""
    from tunewell.cli.render import hanging, table
    from tunewell.core.units import size_bytes

    rows = []
    if not done.exit_code:
        rows = [["wrote", f"`{done.folder / a.path}`", f"{a.name}, {size_bytes(a.num_bytes)}"] for a in done.artefacts]
        rows.append(["wrote", f"`{done.folder / 'parity.json'}`", "the proof; `tunewell verify` repeats it"])
    parts = [table(rows)] if rows else []
    parts += [hanging("note: ", note) for note in done.notes]
    if done.created:
        parts.append(f"Ollama has it as `{done.created}`")
    if done.next_command:
        parts.append(hanging("next: ", f"`{done.next_command}`"))
    return "\n".join(parts)


def announce(words: str) -> None:
    """Say on stderr what is going to be written, so that it stays there."""
    from tunewell.cli.render import hanging

    # From the beginning of the line, over a stage that is being shown there.
    start = "\r\x1b[2K" if sys.stderr.isatty() else ""
    sys.stderr.write(f"{start}{hanging('', words)}\n")
    sys.stderr.flush()
