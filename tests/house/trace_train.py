"""Train a tiny model for a few steps and print which source files that enters; run by `counts.py`."""

import importlib
import inspect
import json
import sys
import threading
from pathlib import Path
from types import FrameType

sys.path.append(str(Path(__file__).parents[1] / "data"))
sys.path.append(str(Path(__file__).parents[1]))

import tunewell

PACKAGE = str(Path(tunewell.__file__).parent)
_MIDDLE = 4
"""A step that is neither evaluated nor saved."""


def main() -> None:
    """Trace `tunewell.train` on 20 rows: everything, and what lies between two step events."""
    from tiny import write_tiny_model

    entered: set[str] = set()
    during_step: set[str] = set()
    is_in_step = False

    def profile(frame: FrameType, event: str, _: object) -> None:
        # Bodies of modules and classes run once, on import: they are not entered by the run.
        is_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED
        if event == "call" and is_function and frame.f_code.co_filename.startswith(PACKAGE):
            entered.add(frame.f_code.co_filename)
            if is_in_step:
                during_step.add(frame.f_code.co_filename)

    def on_step(event: object) -> None:
        nonlocal is_in_step
        is_in_step = getattr(event, "step", None) == _MIDDLE

    rows = [{"instruction": f"What is {n} plus {n}?", "output": f"It is {2 * n}."} for n in range(20)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = {
        "model": "preset:tiny-1m",
        "tokenizer": str(write_tiny_model(Path("tokenizer"))),
        "data": {"sources": "rows.jsonl", "held_out": 0.2},
        "device": "cpu",
        "method": {"kind": "full"},
        "train": {"max_steps": 8, "batch_documents": 2, "threads": 1},
        "evaluate": {"every_steps": 8, "samples": 1, "sample_tokens": 2},
        "checkpoints": {"every_steps": 8},
        "verdict": {"after_training": False},
    }
    importlib.import_module("tunewell.workflows.train")
    _ = tunewell.train
    threading.setprofile(profile)
    sys.setprofile(profile)
    tunewell.train(config, progress=False, on_step=on_step)
    sys.setprofile(None)
    short = {
        name: sorted(path.removeprefix(PACKAGE)[1:] for path in paths if not path.endswith("__init__.py"))
        for name, paths in (("train", entered), ("step", during_step))
    }
    sys.stdout.write(json.dumps(short) + "\n")


if __name__ == "__main__":
    main()
