"""`tunewell profile`: measure some steps in a child process, and again with the best remedy."""

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunewell.config.load import LoadedConfig, as_request, from_request
from tunewell.core.child import ChildDied, answer, call
from tunewell.core.errors import UserError
from tunewell.core.progress import Progress, ProgressListener
from tunewell.features.profile.bottlenecks import ProfileResult, find_bottlenecks
from tunewell.features.profile.records import Profile
from tunewell.runs.config import RunOptions


def profile_config(
    load: Callable[[str | None], LoadedConfig],
    num_steps: int,
    *,
    applies: bool,
    allow_faults: bool,
    progress: ProgressListener,
) -> ProfileResult:
    """Profile some steps of a config in a child process; with `applies`, again with the best remedy.

    `load` returns the config with another setting. Raises UserError if the steps cannot be taken. Nothing is left
    behind.
    """
    request = {"num_steps": num_steps, "faults": os.environ.get("TUNEWELL_FAULTS"), "allow_faults": allow_faults}
    loaded = load(None)
    profile = _measured(loaded, request | {"keeps_waits": False}, progress)
    result = ProfileResult(profile, find_bottlenecks(profile))
    if not applies or not result.bottlenecks:
        return result
    best = result.bottlenecks[0]
    # For too many threads, the time that other programs use the processor counts.
    request |= {"keeps_waits": best.key == "train.threads"}
    return replace(result, applied=_measured(load(f"{best.key}={best.value}"), request, progress))


def _measured(loaded: LoadedConfig, request: dict[str, Any], progress: ProgressListener) -> Profile:
    progress(Progress("importing torch"))
    # On the disk of the run, so that checkpoints take as long as there.
    near = loaded.path(loaded.config.run).absolute().parent
    parent = near if near.is_dir() and os.access(near, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix=".tunewell-profile-", dir=parent) as folder:
        request = {**as_request(loaded), **request, "folder": folder}
        try:
            return Profile.model_validate(call("tunewell.features.profile.workflow", request, progress=progress))
        except ChildDied as died:
            name = died.ended.signal_name
            if not name:
                raise UserError(f"the process that was measured {died}") from died
            fix = "reduce `train.micro_batch_tokens`, or close other programs" if name == "SIGKILL" else None
            where = "most often for memory"
            raise UserError(f"the process that was measured was killed by {name}", where=where, fix=fix) from died


def _measure(request: dict[str, Any], progress: ProgressListener) -> dict[str, Any]:
    """Measure in this process, the child."""
    from tunewell.cli.startup import import_libraries

    loaded = from_request(request)
    import_libraries(device=loaded.config.device)
    from tunewell.features.profile.trial import profile_steps
    from tunewell.workflows.train import require_trainable
    from tunewell.workflows.trial import trial_run

    options = RunOptions(owns_process=True, faults=request["faults"], allow_faults=request["allow_faults"])
    loaded, start = require_trainable(loaded, options)
    with trial_run(loaded, options, Path(request["folder"]), start=start, listener=progress) as (training, _, run):
        training.recorder(Progress(f"measuring {request['num_steps']} steps"))
        profile = profile_steps(
            run,
            request["num_steps"],
            device_label=training.device.label,
            keeps_waits=request["keeps_waits"],
        )
    return profile.model_dump(mode="json")


if __name__ == "__main__":
    answer(_measure)
