"""Run the proof in a new process, so that nothing in this process's memory can help it.

parent  prove_in_new_process(folder)            reads parity.json, or raises the error in proof-error.json
child   python -m tunewell.export.proof_process FOLDER [--allow-pickle]
"""

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path

from tunewell.core.errors import UserError
from tunewell.records.parity import PARITY, Parity, write_record

_ERROR = "proof-error.json"
_EXIT_ERROR = 2


def prove_in_new_process(folder: Path, *, allow_pickle: bool = False) -> Parity:
    """Prove an export and write its `parity.json`; raise UserError if the proof cannot be made."""
    flags = ["--allow-pickle"] if allow_pickle else []
    command = [sys.executable, "-m", __name__, str(folder), *flags]
    ended = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    if (folder / PARITY).is_file():
        return Parity.model_validate_json((folder / PARITY).read_text(encoding="utf-8"))
    error = json.loads((folder / _ERROR).read_text(encoding="utf-8")) if (folder / _ERROR).is_file() else {}
    raise UserError(
        ": ".join(["the export could not be proven", *([error["what"]] if error else [])]),
        where=error.get("where") or f"`{shlex.join(command[1:])}` exited with code {ended.returncode}",
        fix=error.get("fix"),
    )


def main() -> int:
    """Prove the export named on the command line."""
    from tunewell.export.prove import prove_export

    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name if __spec__ else __name__}")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--allow-pickle", action="store_true")
    options = parser.parse_args()
    try:
        write_record(options.folder / PARITY, prove_export(options.folder, allow_pickle=options.allow_pickle))
    except UserError as error:
        message = {"what": error.what, "where": error.where, "fix": error.fix}
        (options.folder / _ERROR).write_text(json.dumps(message), encoding="utf-8")
        return _EXIT_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
