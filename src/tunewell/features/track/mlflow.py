"""Send metrics to MLflow: a server (`MLFLOW_TRACKING_URI`), or its default store in this folder."""

import os
from typing import Any

from tunewell.features.track.base import Point, TrackedRun

_MAX_VALUE = 500
_BATCH = 900
"""MLflow accepts at most 1,000 metrics and 100 parameters in one request."""
_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
"""MLflow's own defaults retry for four minutes without a message, and print a link to stdout at the end of a run.
`live.py` retries too, and notes the failure."""


class MlflowTracker:
    """One MLflow run. MLflow keeps every value of a step with its time, so a rewind is visible in the history."""

    def __init__(self) -> None:
        self._client: Any = None
        self._id = ""

    def open(self, run: TrackedRun, state: dict[str, Any]) -> None:
        """Create an MLflow run, or continue it. The experiment is that of `MLFLOW_EXPERIMENT_NAME`."""
        for key, value in _DEFAULTS.items():
            os.environ.setdefault(key, value)
        from mlflow.entities import Param  # pyright: ignore[reportMissingImports]  of the user's environment
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

        self._client = MlflowClient()
        if "id" not in state:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "tunewell")
            experiment = self._client.get_experiment_by_name(name)
            number = experiment.experiment_id if experiment else self._client.create_experiment(name)
            made = self._client.create_run(number, run_name=run.name)
            params = [Param(key, str(value)[:_MAX_VALUE]) for key, value in run.settings.items()]
            for start in range(0, len(params), 100):
                self._client.log_batch(made.info.run_id, params=params[start : start + 100])
            state["id"] = made.info.run_id
        self._id = state["id"]

    def log(self, points: list[Point]) -> None:
        """Log the values of some points; problems become tags."""
        from mlflow.entities import Metric, RunTag  # pyright: ignore[reportMissingImports]

        metrics = [
            Metric(name, value, int(1000 * point.time), point.step)
            for point in points
            for name, value in {**point.values, "segment": float(point.segment)}.items()
        ]
        tags = [RunTag(f"healing.{point.number}", point.text[:_MAX_VALUE]) for point in points if point.text]
        for start in range(0, len(metrics), _BATCH):
            self._client.log_batch(self._id, metrics=metrics[start : start + _BATCH], tags=tags if not start else [])

    def close(self, status: str) -> None:
        """End the run with its status."""
        self._client.set_tag(self._id, "status", status)
        self._client.set_terminated(self._id, "FINISHED" if status == "finished" else "FAILED")
