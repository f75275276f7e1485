"""Count what makes the code easy or hard to enter: `python tests/house/counts.py` prints every figure and its limit."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "tunewell"
_EXTRA_WORKFLOWS = 3
_TRACER = Path(__file__).with_name("trace_train.py")


def _files() -> dict[str, int]:
    """Return the lines of every source file, `__init__.py` left out."""
    return {
        file.relative_to(PACKAGE).as_posix(): len(file.read_bytes().splitlines())
        for file in sorted(PACKAGE.rglob("*.py"))
        if file.name != "__init__.py"
    }


def _num_commands() -> int:
    return len([file for file in (PACKAGE / "cli" / "commands").glob("*.py") if file.name != "__init__.py"])


LIMITS = {
    "workflow files": _num_commands() + _EXTRA_WORKFLOWS,
    "lines of the longest workflow": 200,
    "lines of the longest file": 450,
    "files entered by one optimizer step": 20,
    "files entered by `train` without a verdict": 110,
}
"""Enforced by `test_packages.py`."""


def count() -> dict[str, int]:
    """Return every figure by its name; traces a training run of a few steps in a process of its own."""
    files = _files()
    workflows = {name: lines for name, lines in files.items() if name.startswith("workflows/")}
    traced = trace()
    return {
        "source files": len(files),
        "source lines": sum(files.values()),
        "workflow files": len(workflows),
        "lines of the longest workflow": max(workflows.values()),
        "lines of the longest file": max(files.values()),
        "files entered by one optimizer step": len(traced["step"]),
        "files entered by `train` without a verdict": len(traced["train"]),
    }


def trace() -> dict[str, list[str]]:
    """Return the source files that one optimizer step, and a whole `train`, enter."""
    with tempfile.TemporaryDirectory(prefix="tunewell-trace-") as folder:
        done = subprocess.run([sys.executable, str(_TRACER)], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    for name, number in count().items():
        limit = f"  at most {LIMITS[name]}" if name in LIMITS else ""
        sys.stdout.write(f"{name:<45}{number:>8,}{limit}\n")
    if "--files" in sys.argv:
        sys.stdout.write(json.dumps(trace(), indent=1) + "\n")
