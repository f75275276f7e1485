"""The protocol of a tracker, and the points that it receives."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class TrackedRun:
    """The run that is tracked."""

    folder: Path
    name: str
    settings: dict[str, Any]
    """The settings by dotted key."""

    @property
    def track_folder(self) -> Path:
        """The folder for the files of trackers."""
        return self.folder / "track"


@dataclass(frozen=True)
class Point:
    """Some metrics of one step. NaN and infinity are floats."""

    number: int
    """Counts the points of a run from 0, over all sessions. It always increases, also if the run rewinds."""
    step: int
    segment: int
    """Number of times that the run went back to an earlier step before this point."""
    values: dict[str, float]
    time: float
    """Seconds since 1970."""
    text: str = ""
    """A problem and its remedy, from `healing.jsonl`; else empty."""


class Tracker(Protocol):
    """Sends the points of one run to a tracking program. Any exception means: try again later."""

    def open(self, run: TrackedRun, state: dict[str, Any]) -> None:
        """Start, or go on with, the tracker's record of a run. `state` is kept between sessions: ids, names."""
        ...

    def log(self, points: list[Point]) -> None:
        """Send some points, and return when they are safe: they are not sent again."""
        ...

    def close(self, status: str) -> None:
        """End the record. `status` is that of the run: `finished`, `stopped`, `running`, ..."""
        ...


@dataclass
class SentState:
    """What was sent so far; stored beside the run."""

    number: int = 0
    segment: int = 0
    rewinds: int = 0
    healing_lines: int = 0
    num_cut: int = 0
    """Number of sent lines that are no longer in the log, because the run went back."""
    state: dict[str, Any] = field(default_factory=dict)
