"""The process that verifies an export from its files alone. It imports torch while the export is still being written.

parent  ProofProcess()            runs this module in a new process, which imports its libraries and waits
        .prove(folder)            sends the folder, forwards the progress, and reads parity.json or proof-error.json
"""

import gc
import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from tunewell.core.errors import UserError
from tunewell.core.progress import Progress, ProgressListener, silent
from tunewell.records.parity import PARITY, PROOF_ERROR, Parity


class ProofProcess:
    """A process that verifies one export. It shares no memory with the process that writes the files."""

    def __init__(self) -> None:
        """Start the process. It waits until `prove` is called, and ends when this object is closed."""
        command = [sys.executable, "-m", "tunewell.export.proof_process"]
        # A session of its own: an interrupt ends the parent, which then ends this process without a second traceback.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def prove(self, folder: Path, *, allow_pickle: bool = False, progress: ProgressListener = silent) -> Parity:
        """Verify an export and write its `parity.json`; raise UserError if the verification cannot run."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # if the process has ended, its exit code is reported below
            self._process.stdin.write(json.dumps({"folder": str(folder), "allow_pickle": allow_pickle}) + "\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                progress(Progress(**json.loads(line)))
        code = self._process.wait()
        if (folder / PARITY).is_file():
            return Parity.model_validate_json((folder / PARITY).read_text(encoding="utf-8"))
        path = folder / PROOF_ERROR
        error = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        raise UserError(
            ": ".join(["the export could not be verified", *([error["what"]] if error else [])]),
            where=error.get("where") or f"`python -m tunewell.export.proof_process` exited with code {code}",
            fix=error.get("fix"),
        )

    def close(self) -> None:
        """End the process if it has not verified anything yet."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None and not stream.closed:
                with suppress(BrokenPipeError):
                    stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def prove_in_new_process(folder: Path, *, allow_pickle: bool = False, progress: ProgressListener = silent) -> Parity:
    """Verify an export in a process that is started now."""
    with ProofProcess() as process:
        return process.prove(folder, allow_pickle=allow_pickle, progress=progress)


if __name__ == "__main__":
    gc.disable()  # imports create many objects and free few; collecting took a sixth of their time
    from tunewell.export.prove import main
    from tunewell.machine.allocator import keep_freed_memory
    from tunewell.machine.facts import cpu_facts

    keep_freed_memory(cpu_facts().free_bytes)  # every tensor is dequantised into new memory
    exit_code = main()
    # Python looks for cycles among all objects before it exits, which takes a second with torch and transformers.
    gc.freeze()
    sys.exit(exit_code)
