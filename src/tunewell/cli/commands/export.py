"""`tunewell export`: write a trained model as an adapter, merged weights, GGUF or Ollama files."""

import shlex
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from tunewell.cli.options import AllowPickle, AsJson, Option, RunArgument, Sets
from tunewell.cli.progress import shown_stages
from tunewell.cli.render import emit, hanging, json_text
from tunewell.cli.screens.export import parity_screen
from tunewell.cli.screens.verdict import lined
from tunewell.cli.startup import clean_up_when_terminated, import_libraries, keep_memory_on_cpu
from tunewell.core.units import size_bytes
from tunewell.export.options import ExportOptions

if TYPE_CHECKING:
    from tunewell.workflows.export import ExportResult


def command(
    place: RunArgument = None,
    *,
    options: ExportOptions,
    no_create: Annotated[bool, Option("Do not call `ollama create`.")] = False,
    set_: Sets = None,
    allow_pickle: AllowPickle,
    json: AsJson = False,
) -> int:
    """Export a run to an adapter, merged weights, GGUF or Ollama.

    Each export is compared with the trained model. Exit code 4: one does not match.
    """
    from tunewell.export.proof_process import ProofProcess

    clean_up_when_terminated()
    options = replace(options, sets=set_ or (), creates=not no_create, allow_pickle=allow_pickle).checked()
    # Whatever is wrong with the run is reported before torch is imported.
    ref = options.find_model(place)
    with ProofProcess() as proof, shown_stages() as progress:
        import_libraries(progress, device="cpu", model=ref.model, workflow="export")
        keep_memory_on_cpu("cpu")
        from tunewell.workflows.export import export

        exported = export(ref, order=options, progress=progress, announce=announce, prove=proof.prove)
    emit(json_text(exported.as_json()) if json else export_screen(exported))
    return exported.exit_code


def export_screen(exported: "ExportResult") -> str:
    """Return the comparison with the trained model, the written files, the notes and the next command."""
    rows = []
    if not exported.exit_code:
        rows = [
            ["wrote", f"`{exported.folder / artefact.path}`", f"{artefact.name}, {size_bytes(artefact.num_bytes)}"]
            for artefact in exported.artefacts
        ]
        again = f"the verification; `tunewell verify {shlex.quote(str(exported.folder))}` repeats it"
        rows.append(["wrote", f"`{exported.folder / 'parity.json'}`", again])
    parts = [parity_screen(exported.parity), *([lined(rows)] if rows else [])]
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
