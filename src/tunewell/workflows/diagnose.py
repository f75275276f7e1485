"""`tunewell diagnose`: name the failure in a log, a run, a notebook, a config or a typed sentence."""

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from tunewell.core.errors import UserError
from tunewell.diagnosis.diagnose import diagnose_config, diagnose_paths, diagnose_stream
from tunewell.diagnosis.findings import Diagnosis


def diagnose(sources: Sequence[str], stdin: BinaryIO, *, rows: Path | None = None) -> Diagnosis:
    """Return the diagnosis of files and folders, or of stdin if the source is `-`.

    `rows` is compared with the length limit of a config. Raises UserError if a source cannot be read.
    """
    if rows is not None:
        if len(sources) != 1 or not Path(sources[0]).is_file():
            raise UserError("`--rows` needs one config file", fix="`tunewell diagnose config.yaml --rows train.jsonl`")
        return diagnose_config(Path(sources[0]), rows)
    if list(sources) == ["-"]:
        return diagnose_stream(stdin)
    return diagnose_paths([Path(source) for source in sources])
