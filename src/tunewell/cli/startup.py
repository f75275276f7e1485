"""Start-up of commands that load a model: work that needs no Python runs while torch and transformers are imported."""

import gc
import importlib
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from tunewell.core.progress import Progress, ProgressListener, silent


def clean_up_when_terminated() -> None:
    """End with an exception on SIGTERM and SIGHUP, so that a child and temporary folders are removed.

    A second signal is ignored, and so is one that was ignored before, as by `nohup`.
    """

    def end(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        sys.exit(128 + number)

    for one in signal.Signals:
        if one.name in ("SIGTERM", "SIGHUP") and signal.getsignal(one) == signal.SIG_DFL:
            signal.signal(one, end)


def import_libraries(
    progress: ProgressListener = silent,
    *,
    device: str,
    model: str | Path | None = None,
    workflow: str = "train",
) -> None:
    """Import torch, transformers and a workflow; meanwhile, read the weights ahead and initialise the GPU."""
    progress(Progress("importing torch"))
    _read_ahead(model)
    gc.disable()  # imports create many objects and free few; collecting took a sixth of their time
    import torch

    if device.startswith(("auto", "cuda")) and torch.cuda.is_available():
        index = device.partition(":")[2] or os.environ.get("LOCAL_RANK", "0")
        threading.Thread(target=_initialise_gpu, args=[index], daemon=True).start()
    _import_transformers()
    importlib.import_module(f"tunewell.workflows.{workflow}")
    gc.enable()
    gc.freeze()


def keep_memory_on_cpu(device: str) -> None:
    """Keep freed memory in the process if the model runs on the CPU, as `train` does: each forward pass needs it again.

    Without this, a command that evaluates a model spends up to a tenth of its time on pages that the system zeroes.
    """
    import torch

    from tunewell.machine.allocator import keep_freed_memory
    from tunewell.machine.facts import cpu_facts

    if device == "cpu" or not (torch.cuda.is_available() or torch.backends.mps.is_available()):
        keep_freed_memory(cpu_facts().free_bytes)


def _read_ahead(model: str | Path | None) -> None:
    """Ask the system to read the model's weights into memory; do nothing for a model that is not a local path."""
    if not model or not hasattr(os, "posix_fadvise"):
        return
    path = Path(model)
    for file in [path, *path.glob("*.safetensors")]:
        if file.is_file():
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def _initialise_gpu(index: str) -> None:
    """Create the CUDA context and load the library of matrix products. Errors are reported by the command itself."""
    import torch

    if index.isdecimal() and int(index) < torch.cuda.device_count():
        values = torch.zeros(8, 8, device=f"cuda:{index}", dtype=torch.float16)
        torch.mm(values, values)


def _import_transformers() -> None:
    """Import transformers without scikit-learn, which some versions (5.17) import for a feature that is not used.

    Importing scikit-learn takes two to three seconds.
    """
    utils: Any = importlib.import_module("transformers.utils")
    is_available = utils.is_sklearn_available
    utils.is_sklearn_available = lambda: False
    try:
        importlib.import_module("transformers.generation.candidate_generator")
    finally:
        utils.is_sklearn_available = is_available
