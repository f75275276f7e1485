"""Write event files for TensorBoard into `RUN/track/tensorboard`, without torch."""

# pyright: reportMissingImports=false
# TensorBoard is not installed with tunewell.

from pathlib import Path
from typing import Any

from tunewell.features.track.base import Point, TrackedRun


class TensorBoardTracker:
    """One event file per session and segment: after a rewind, TensorBoard shows `rewind-1` beside the first curve."""

    def __init__(self) -> None:
        self._folder = Path()
        self._writers: dict[int, Any] = {}

    def open(self, run: TrackedRun, state: dict[str, Any]) -> None:
        """Import TensorBoard, and write the settings as text the first time."""
        from tensorboard.plugins.text.summary_v2 import text_pb  # pyright: ignore[reportMissingImports]

        self._folder = run.track_folder / "tensorboard"
        if not state.get("has_settings"):
            lines = "\n".join(f"    {key}: {value}" for key, value in sorted(run.settings.items()))
            self._add(0, text_pb("settings", lines), 0, None)
            self._flush()
            state["has_settings"] = True

    def log(self, points: list[Point]) -> None:
        """Write scalars by their step, and problems as text."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportMissingImports]
        from tensorboard.plugins.text.summary_v2 import text_pb  # pyright: ignore[reportMissingImports]

        for point in points:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
            self._add(point.segment, Summary(value=values), point.step, point.time)
            if point.text:
                self._add(point.segment, text_pb("healing", point.text), point.step, point.time)
        self._flush()

    def close(self, status: str) -> None:
        """Close all event files."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _add(self, segment: int, summary: Any, step: int, time: float | None) -> None:
        import time as clock

        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportMissingImports]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # pyright: ignore[reportMissingImports]

        if segment not in self._writers:
            folder = self._folder / f"rewind-{segment}" if segment else self._folder
            self._writers[segment] = EventFileWriter(str(folder))
        wall_time = clock.time() if time is None else time
        self._writers[segment].add_event(Event(wall_time=wall_time, step=step, summary=summary))

    def _flush(self) -> None:
        for writer in self._writers.values():
            writer.flush()
