"""`tunewell doctor` without the packages of the command line, one of which is broken."""

import sys
from collections.abc import Sequence

from tunewell.cli.render import emit, json_text
from tunewell.features.doctor.screen import doctor_screen
from tunewell.features.doctor.workflow import doctor


def run(arguments: Sequence[str], error: ImportError) -> int:
    """Run the checks, print them and return the exit code. Of the options, `--json` and `--fix` are read."""
    sys.stderr.write(f"note: only `--json` and `--fix` are read, because a package is broken: {error}\n")
    found = doctor()
    text = json_text(found.as_json()) if "--json" in arguments else doctor_screen(found)
    emit(found.fix_script() if "--fix" in arguments else text)
    return found.exit_code
