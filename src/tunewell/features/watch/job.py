"""Run one command for the page, and write its exit code beside its output: `python -m ... FOLDER ARGUMENTS`."""

import sys
from pathlib import Path

from tunewell.cli.main import run
from tunewell.core.files import write_atomic

if __name__ == "__main__":
    _folder, sys.argv[1:] = Path(sys.argv[1]), sys.argv[2:]
    try:
        run()
    except SystemExit as _end:
        write_atomic(_folder / "code", str(_end.code))
        raise
