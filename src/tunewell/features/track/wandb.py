"""Send metrics to Weights & Biases, online or offline (`WANDB_MODE=offline`)."""

import importlib
import os
import secrets
from typing import Any

from tunewell.features.track.base import Point, TrackedRun


class WandbTracker:
    """One W&B run. Its own step always increases; the x-axis is the metric `step`, which a rewind moves back."""

    def __init__(self) -> None:
        self._run: Any = None

    def open(self, run: TrackedRun, state: dict[str, Any]) -> None:
        """Start a W&B run, or go on with it. Project and entity are those of `WANDB_PROJECT` and `WANDB_ENTITY`."""
        wandb: Any = importlib.import_module("wandb")  # of the user's environment
        state.setdefault("id", secrets.token_hex(4))
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "tunewell"),
            id=state["id"],
            name=run.name,
            config=run.settings,
            dir=str(run.track_folder),
            resume="allow",
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, points: list[Point]) -> None:
        """Log each point once, with the raw values."""
        for point in points:
            text = {"healing": point.text} if point.text else {}
            row = {**point.values, **text, "step": point.step, "segment": point.segment}
            self._run.log(row, step=point.number, commit=True)

    def close(self, status: str) -> None:
        """Finish the run; a run that did not finish has exit code 1."""
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status == "finished" else 1)
