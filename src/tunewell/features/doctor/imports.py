"""Try imports in a child process with a time limit, because a broken package may raise, crash or hang."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tunewell.core.child import Child
from tunewell.core.files import parse_json, read_bytes
from tunewell.features.doctor.facts import ImportTrial

TRIALS: dict[str, str] = parse_json(read_bytes(Path(__file__).with_name("stack.json")))["trials"]
"""The statement that proves each package, requirements first. unsloth is not tried: it changes other packages.

`import transformers` is lazy: only a class of a model imports torch, torchvision and the hub.
"""

TIME_LIMIT = 60.0
"""Seconds for one import. torch takes 2 to 10 s; on a network drive up to a minute."""
_NUMPY_1 = "compiled using NumPy 1.x"
_SCRIPT = Path(__file__).with_name("import_trial.py")


def try_imports(
    python: str, installed: Sequence[str], *, progress: Callable[[str], None], time_limit: float = TIME_LIMIT
) -> list[ImportTrial]:
    """Import every installed package of `TRIALS`, in children of the interpreter `python`."""
    left = [name for name in TRIALS if name in installed]
    done: list[ImportTrial] = []
    while left:
        found = _run_child(python, left, progress=progress, time_limit=time_limit)
        if not found:
            break  # the interpreter itself does not start
        done += found
        left = left[len(found) :]
    return done


def _run_child(
    python: str, names: Sequence[str], *, progress: Callable[[str], None], time_limit: float
) -> list[ImportTrial]:
    """Return the results up to the first import that fails, crashes or hangs."""
    trials = [f"{name}={TRIALS[name]}" for name in names]
    environment = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done: list[ImportTrial] = []
    current, reason = None, ""
    with Child([python, "-W", "default", str(_SCRIPT), *trials], environment=environment) as child:
        try:
            for report in child.messages(time_limit):
                if "begin" in report:
                    current = report["begin"]
                    progress(f"importing {current}")
                else:
                    done.append(_trial(report))
                    current = None
            reason = _crash(child.wait().code)
        except TimeoutError as error:
            reason = str(error)
    if current is not None:
        done.append(ImportTrial(current, error=reason, culprit=current))
    return done


def _trial(report: dict[str, Any]) -> ImportTrial:
    error = report["error"]
    # torch prints NumPy's complaint and goes on without NumPy, so the import seems to succeed.
    if _NUMPY_1 in report["printed"] and (error is None or "numpy" in error.lower()):
        error = "ImportError: a module that was compiled using NumPy 1.x cannot be run in NumPy 2"
    return ImportTrial(
        name=report["name"],
        error=error,
        culprit=report.get("culprit") or (report["name"] if error else None),
        seconds=report.get("seconds"),
        facts=report.get("facts") or {},
    )


def _crash(code: int) -> str:
    signals = {-4: "SIGILL, an instruction that this CPU does not have", -11: "SIGSEGV", -6: "SIGABRT", -9: "killed"}
    return f"the interpreter crashed: {signals.get(code, f'exit code {code}')}"
