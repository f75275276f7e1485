"""Run every combination of method, precision, tokens, saved modules, model and export on a device.

    python benchmarks/combinations.py --device cuda

All combinations run in one process through the library (`tests/workflows/combination_matrix.py`). Then the command line
runs once each for LoRA, NF4 and GaLore. The exit code is 1 if anything failed.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_FOLDERS = ["src", *(f"tests/{name}" for name in ("workflows", "data", "export", "training"))]
sys.path[:0] = [str(ROOT / name) for name in _FOLDERS]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])

import combination_matrix as matrix  # noqa: E402

_COMMANDS = ("lora-bf16-llama-tied-added-none-gguf", "lora-nf4-bf16-llama-added-none-merged")
_COMMANDS += ("galore-bf16-llama-added-none-merged",)


def measure(title: str, chosen: Sequence[Any], act: Callable[[Any], None]) -> int:
    """Run each one and print what failed. Return the number of failures."""
    failed, begun = 0, time.monotonic()
    for one in chosen:
        started = time.monotonic()
        try:
            act(one)
            print(f"ok    {time.monotonic() - started:5.1f} s  {one}", flush=True)
        except Exception as error:  # noqa: BLE001  a report of all failures is the purpose
            failed += 1
            print(f"FAIL  {one}: {type(error).__name__}: {error}", flush=True)
    print(f"{title}: {len(chosen) - failed} of {len(chosen)} passed in {time.monotonic() - begun:.0f} s", flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--only", default="", help="run the combinations whose name contains this text")
    options = parser.parse_args()
    chosen = [one for one in matrix.COMBINATIONS if options.only in str(one)]
    commands = [one for one in matrix.COMBINATIONS if str(one) in _COMMANDS]
    with tempfile.TemporaryDirectory(prefix="tunewell-combinations-") as place:
        folder = matrix.write_models(Path(place))
        failed = measure("library", chosen, partial(matrix.run, folder=folder, device=options.device))
        failed += measure("command line", commands, partial(matrix.run_commands, folder=folder, device=options.device))
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
