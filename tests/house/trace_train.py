"""Train a tiny model for a few steps and print how many functions that enters; run by `counts.py`."""

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
    """Trace `tunewell.train` on 20 rows, with each method."""
    from tiny import write_tiny_model

    rows = [{"instruction": f"What is {n} plus {n}?", "output": f"It is {2 * n}."} for n in range(20)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = {
        "model": "preset:tiny-1m",
        "tokenizer": str(write_tiny_model(Path("tokenizer"))),
        "data": {"sources": "rows.jsonl", "held_out": 0.2},
        "device": "cpu",
        "train": {"max_steps": 8, "batch_documents": 2, "threads": 1},
        "evaluate": {"every_steps": 8, "samples": 1, "sample_tokens": 2},
        "checkpoints": {"every_steps": 8},
        "verdict": {"after_training": False},
    }
    importlib.import_module("tunewell.workflows.train")
    _ = tunewell.train
    figures = {}
    for kind in ("lora", "dora", "full"):
        step, whole = _trace(config | {"method": {"kind": kind}, "run": kind})
        figures[f"functions entered by one step, {kind}"] = len(step)
        if kind == "lora":
            figures["functions entered by `train`, lora"] = len(whole)
    sys.stdout.write(json.dumps(figures) + "\n")


def _trace(config: dict[str, object]) -> tuple[set[str], set[str]]:
    """Return the functions that one step, and the whole of `train`, enter."""
    entered: set[str] = set()
    during_step: set[str] = set()
    is_in_step = False

    def profile(frame: FrameType, event: str, _: object) -> None:
        # Bodies of modules and classes run once, on import: they are not entered by the run.
        code = frame.f_code
        if event == "call" and code.co_flags & inspect.CO_OPTIMIZED and code.co_filename.startswith(PACKAGE):
            entered.add(name := f"{code.co_filename}:{code.co_qualname}")
            # Other threads write files and heartbeats whenever the machine lets them.
            if is_in_step and threading.current_thread() is threading.main_thread():
                during_step.add(name)

    def on_step(event: object) -> None:
        nonlocal is_in_step
        is_in_step = getattr(event, "step", None) == _MIDDLE

    threading.setprofile(profile)
    sys.setprofile(profile)
    tunewell.train(config, progress=False, on_step=on_step)
    sys.setprofile(None)
    threading.setprofile(None)  # pyright: ignore[reportArgumentType]
    return during_step, entered


if __name__ == "__main__":
    main()
