"""The end of `tunewell train`: carry out `export.to` with the model that was trained."""

import shlex
from dataclasses import dataclass

from tunewell.config.load import LoadedConfig
from tunewell.core.errors import UserError
from tunewell.core.launcher import is_first
from tunewell.core.progress import ProgressListener, silent
from tunewell.runs.result import TrainResult
from tunewell.workflows.export import Announce, ExportResult, export

_EXIT_NOT_EXPORTED = 2


@dataclass(frozen=True)
class ExportStep:
    """The export after a run: its result, or why there is none."""

    exported: ExportResult | None = None
    note: str = ""
    exit_code: int = 0


def export_after_training(
    loaded: LoadedConfig,
    result: TrainResult,
    *,
    allow_pickle: bool,
    progress: ProgressListener = silent,
    announce: Announce | None = None,
) -> ExportStep:
    """Export a finished run to the targets of `export.to`. A model whose verdict is FAIL is not exported.

    The model is trained and saved, so a UserError becomes a note with the command that repeats the export.
    """
    targets = loaded.config.export.to
    if not targets or result.status != "finished" or not is_first():
        return ExportStep()
    command = shlex.join(["tunewell", "export", str(result.run), "--to", ",".join(targets)])
    if result.validation is not None and result.validation.report.verdict == "FAIL":
        return ExportStep(note=f"not exported, because the verdict is FAIL; `{command}` exports it anyway")
    try:
        exported = export(result.run, to=targets, allow_pickle=allow_pickle, progress=progress, announce=announce)
    except UserError as error:
        fix = f" ({error.fix})" if error.fix else ""
        note = f"the model is trained and saved, but it was not exported: {error.what}{fix}; then run `{command}`"
        return ExportStep(note=note, exit_code=_EXIT_NOT_EXPORTED)
    return ExportStep(exported, exit_code=exported.exit_code)
