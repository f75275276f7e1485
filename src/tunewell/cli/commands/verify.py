"""`tunewell verify`: check again that an export matches the trained model."""

from pathlib import Path
from typing import Annotated

from tunewell.cli.options import AllowPickle, Argument, AsJson, Option
from tunewell.cli.progress import shown_stages
from tunewell.cli.render import emit, hanging, json_text
from tunewell.cli.screens.export import parity_screen
from tunewell.core.files import is_url
from tunewell.core.progress import Progress


def command(
    folder: Annotated[str, Argument("A folder that `tunewell export` wrote, or where `push` uploaded it.", "EXPORT")],
    base: Annotated[str | None, Option("The base model of an adapter, if it has moved.")] = None,
    *,
    allow_pickle: AllowPickle,
    json: AsJson = False,
) -> int:
    """Check again that an export matches the trained model.

    Compares token ids, logits, answers and tensors. Exit code 4: they do not match.
    """
    from tunewell.records.parity import read_proof

    if not is_url(folder):
        read_proof(Path(folder))  # a folder that is not an export is reported before torch is imported
    with shown_stages() as progress:
        progress(Progress("importing torch"))
        from tunewell.workflows.verify import EXIT_NOT_PROVEN, verify

        notes: list[str] = []
        parity = verify(folder, base=base, allow_pickle=allow_pickle, progress=progress, notes=notes)
    if json:
        emit(json_text(parity.model_dump(mode="json") | {"notes": notes}))
    else:
        emit("\n".join([parity_screen(parity), *(hanging("note: ", note) for note in notes)]))
    return 0 if parity.is_ok else EXIT_NOT_PROVEN
