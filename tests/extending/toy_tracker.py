"""A tracker that writes JSON lines to `track/toy.jsonl`; it hangs, fails or kills its process as variables say."""

import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

from tunewell.features.track.base import Point, TrackedRun


def _hang(how: str = "hangs") -> None:
    while os.environ.get("TOY_TRACKER") == how:
        time.sleep(0.01)


class ToyTracker:
    def __init__(self) -> None:
        self._path = Path()
        _hang()

    def open(self, run: TrackedRun, state: dict[str, Any]) -> None:
        self._path = run.track_folder / "toy.jsonl"
        state["sessions"] = state.get("sessions", 0) + 1
        self._write({"open": run.name, "settings": run.settings})

    def log(self, points: list[Point]) -> None:
        refusal = Path(os.environ.get("TOY_REFUSES", "/nowhere"))
        if refusal.is_file():
            raise ConnectionError("the server does not answer")
        _hang("hangs later")
        if any(str(point.step) == os.environ.get("TOY_KILLS") for point in points):
            os.kill(os.getpid(), signal.SIGKILL)
        for point in points:
            values = {name: value if math.isfinite(value) else str(value) for name, value in point.values.items()}
            self._write({**point.__dict__, "values": values})

    def close(self, status: str) -> None:
        _hang("hangs at the end")
        self._write({"close": status})

    def _write(self, row: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
