"""The process that verifies an export from its files alone. It imports torch while the export is still being written.

parent  ProofProcess()            runs this module in a new process, which imports its libraries and waits
        .prove(folder)            sends the folder, forwards the progress, and reads parity.json
"""

import gc
import sys
from pathlib import Path
from typing import Any

from tunewell.core.child import Child, ChildDied
from tunewell.core.errors import UserError
from tunewell.core.files import read_text
from tunewell.core.progress import ProgressListener, silent
from tunewell.records.parity import PARITY, Parity


class ProofProcess(Child):
    """A process that verifies one export. It shares no memory with the process that writes the files."""

    def __init__(self) -> None:
        """Start the process. It waits until `prove` is called, and ends when this object is closed."""
        command = [sys.executable, "-m", "tunewell.export.proof_process"]
        # An interrupt ends the parent, which then ends this process without a second traceback.
        super().__init__(command, has_session=True, shows_errors=True)

    def prove(self, folder: Path, *, progress: ProgressListener = silent, **fields: Any) -> Parity:
        """Verify an export and write its `parity.json`; raise UserError if the verification cannot run.

        `fields` are those of `prove_export`.
        """
        try:
            self.ask({"folder": str(folder), **fields}, progress=progress)
        except (UserError, ChildDied) as error:
            where, fix = (error.where, error.fix) if isinstance(error, UserError) else (None, None)
            raise UserError(
                "the export could not be verified" + (f": {error.what}" if isinstance(error, UserError) else ""),
                where=where or f"`python -m tunewell.export.proof_process` exited with code {self.wait().code}",
                fix=fix,
            ) from error
        return Parity.model_validate_json(read_text(folder / PARITY))


if __name__ == "__main__":
    gc.disable()  # imports create many objects and free few; collecting took a sixth of their time
    from tunewell.export.prove import main
    from tunewell.machine.allocator import keep_freed_memory
    from tunewell.machine.facts import cpu_facts

    keep_freed_memory(cpu_facts().free_bytes)  # every tensor is dequantised into new memory
    main()
    # Python looks for cycles among all objects before it exits, which takes a second with torch and transformers.
    gc.freeze()
