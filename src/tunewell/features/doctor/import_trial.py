"""Import modules one by one and report each result. A script for a child process, with the standard library only.

Each argument is `NAME=STATEMENT`. A report is one line of JSON on stdout. What the modules print goes to a file and
into the report: torch prints that NumPy does not fit, and goes on. The process ends after the first failure, because a
half-imported module would spoil the next trial.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from typing import IO

_MAX_MESSAGE = 600
_MAX_PRINTED = 20_000
_MAX_CHAIN = 20


def _send(descriptor: int, **report: object) -> None:
    os.write(descriptor, (json.dumps(report) + "\n").encode())


def _facts(name: str) -> dict[str, object]:
    """Return what only the imported module knows."""
    module = sys.modules.get(name)
    if name != "torch" or module is None:
        return {}
    arches = getattr(module._C, "_cuda_getArchFlags", lambda: "")()
    return {"cuda_available": bool(module.cuda.is_available()), "arches": (arches or "").split()}


def _root(error: BaseException) -> BaseException:
    """Return the first error of a chain. transformers and trl hide it behind their own."""
    for _ in range(_MAX_CHAIN):
        cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if cause is None:
            break
        error = cause
    return error


def _culprit(error: BaseException) -> str | None:
    """Return the package of the last frame inside an installed package."""
    found = None
    for frame in traceback.extract_tb(error.__traceback__):
        parts = frame.filename.replace("\\", "/").split("/")
        for folder in ("site-packages", "dist-packages"):
            if folder in parts[:-1]:
                found = parts[parts.index(folder) + 1].removesuffix(".py")
    return found


def main(descriptor: int, trials: list[str], printed: IO[bytes]) -> None:
    """Run the trials in order."""
    for trial in trials:
        name, _, statement = trial.partition("=")
        _send(descriptor, begin=name)
        started = time.perf_counter()
        start_of_text = os.fstat(printed.fileno()).st_size
        report: dict[str, object] = {"name": name, "error": None, "culprit": None}
        try:
            exec(statement, {"__name__": "trial"})  # noqa: S102  the statements are our own
        except BaseException as error:  # noqa: BLE001  a package may raise anything, even SystemExit
            root = _root(error)
            message = f"{type(error).__name__}: {error}"[:_MAX_MESSAGE]
            if root is not error:
                message += f"; caused by {type(root).__name__}: {root}"[:_MAX_MESSAGE]
            report |= {"error": message, "culprit": _culprit(root) or _culprit(error)}
        else:
            report |= {"seconds": time.perf_counter() - started, "facts": _facts(name)}
        sys.stderr.flush()
        text = os.pread(printed.fileno(), _MAX_PRINTED, start_of_text) if hasattr(os, "pread") else b""
        _send(descriptor, **report, printed=text.decode(errors="replace"))
        if report["error"] is not None:
            return


if __name__ == "__main__":
    reports = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        main(reports, sys.argv[1:], file)
        os._exit(0)  # skip the clean-up of libraries, which takes up to a second and can hang
