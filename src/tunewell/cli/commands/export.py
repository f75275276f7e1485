"""`tunewell export`: write a trained model as an adapter, merged weights, GGUF or Ollama files."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from tunewell.cli.options import AllowPickle, AsJson, Option, RunArgument, Sets
from tunewell.cli.progress import shown_stages
from tunewell.cli.render import emit, hanging, json_text
from tunewell.cli.screens.export import parity_screen
from tunewell.cli.screens.verdict import lined
from tunewell.config.extensions import EXPORT_TARGETS, GgufFormat, MergedPrecision
from tunewell.core.progress import Progress
from tunewell.core.units import size_bytes

if TYPE_CHECKING:
    from tunewell.workflows.export import ExportResult


def _names(values: tuple[str, ...]) -> str:
    return ", ".join(f"`{value}`" for value in values)


def command(
    place: RunArgument = None,
    to: Annotated[
        str | None,
        Option(f"Export targets, separated by commas: {_names(EXPORT_TARGETS.names())}.", "TARGETS"),
    ] = None,
    gguf: Annotated[
        str | None,
        Option(f"GGUF types, separated by commas: {_names(get_args(GgufFormat))}.", "TYPES"),
    ] = None,
    precision: Annotated[
        str | None, Option(f"Precision of merged weights: {_names(get_args(MergedPrecision))}.")
    ] = None,
    out: Annotated[Path | None, Option("Folder to write. Default: `export` in the run's folder.")] = None,
    checkpoint: Annotated[str, Option("`best` by held-out loss, `last`, or a step.")] = "best",
    base: Annotated[str | None, Option("The base model, if the adapter does not name it.")] = None,
    name: Annotated[str | None, Option("Name of the model in Ollama. Default: the run's name.")] = None,
    no_create: Annotated[bool, Option("Do not call `ollama create`.")] = False,
    set_: Sets = None,
    *,
    allow_pickle: AllowPickle,
    json: AsJson = False,
) -> None:
    """Export a run to an adapter, merged weights, GGUF or Ollama.

    Each export is compared with the trained model. Exit code 4: one does not match.
    """
    from tunewell.export.options import ExportOptions
    from tunewell.export.proof_process import ProofProcess
    from tunewell.runs.resolve import resolve_model

    options = ExportOptions(
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
    # Whatever is wrong with the run is reported before torch is imported.
    ref = resolve_model(place, checkpoint=checkpoint, base=base, sets=set_ or ())
    with ProofProcess() as proof, shown_stages() as progress:
        progress(Progress("importing torch"))
        from tunewell.cli.startup import import_libraries, keep_memory_on_cpu

        import_libraries(device="cpu", model=ref.model, workflow="export")
        keep_memory_on_cpu("cpu")
        from tunewell.workflows.export import export

        exported = export(ref, order=options, progress=progress, announce=announce, prove=proof.prove)
    emit(json_text(exported.as_json()) if json else f"{parity_screen(exported.parity)}\n{summary(exported)}")
    if exported.exit_code:
        raise typer.Exit(exported.exit_code)


def summary(exported: "ExportResult") -> str:
    """Return the written files, the notes and the next command as text."""
    rows = []
    if not exported.exit_code:
        rows = [
            ["wrote", f"`{exported.folder / artefact.path}`", f"{artefact.name}, {size_bytes(artefact.num_bytes)}"]
            for artefact in exported.artefacts
        ]
        rows.append(["wrote", f"`{exported.folder / 'parity.json'}`", "the verification; `tunewell verify` repeats it"])
    parts = [lined(rows)] if rows else []
    parts += [hanging("note: ", note) for note in exported.notes]
    if exported.created:
        parts.append(f"created `{exported.created}` in Ollama")
    if exported.next_command:
        parts.append(hanging("next: ", f"`{exported.next_command}`"))
    return "\n".join(parts)


def announce(message: str) -> None:
    """Print a permanent message on stderr, above the progress line."""
    # Clear the progress text on this line.
    start = "\r\x1b[2K" if sys.stderr.isatty() else ""
    sys.stderr.write(f"{start}{hanging('', message)}\n")
    sys.stderr.flush()
