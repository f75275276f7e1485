"""`tunewell verify`: verify an export again, from the files in its folder."""

import tempfile
from pathlib import Path
from typing import Any

from tunewell.config.load import load_config
from tunewell.core.features import require_hook
from tunewell.core.files import is_url
from tunewell.core.progress import ProgressListener, silent
from tunewell.export.prove import prove_export
from tunewell.records.parity import PARITY, Parity, write_record

EXIT_NOT_PROVEN = 4


def verify(
    folder: str | Path,
    *,
    progress: ProgressListener = silent,
    notes: list[str] | None = None,
    **fields: Any,
) -> Parity:
    """Compare every artefact of an export with the trained model. Write `parity.json`, or add a note if that fails.

    An export at an address, where `tunewell push` uploaded it, is downloaded first. `fields` are those of ProofContext.
    """
    if is_url(str(folder)):
        with tempfile.TemporaryDirectory(prefix="tunewell-verify-") as pulled:
            settings = load_config().config.storage
            pull_folder = require_hook("remote", "pull", needed_by="an export at an address")
            pull_folder(str(folder), Path(pulled), settings=settings, progress=progress)
            return prove_export(Path(pulled), progress=progress, **fields)
    folder = Path(folder).expanduser()
    parity = prove_export(folder, progress=progress, **fields)
    try:
        write_record(folder / PARITY, parity)
    except OSError as error:
        if notes is not None:
            notes.append(f"`{folder / PARITY}` could not be written: {error.strerror or error}")
    return parity
