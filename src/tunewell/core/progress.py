"""The progress protocol: one dataclass and one callable that every long operation reports to."""

from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Progress:
    """How far a stage of a long operation is."""

    stage: str
    """The current stage as text for a screen: `loading the model`. Empty when the stage is over."""
    done: int = 0
    total: int = 0
    """0 where the total is unknown."""
    unit: str = ""
    """What `done` and `total` count: `bytes`, `documents`."""
    rows: int = 0
    """Rows read so far, where `done` counts bytes."""


ProgressListener = Callable[[Progress], None]
"""Receives progress. It returns at once and never raises."""


def silent(_: object) -> None:
    """Ignore an event: the listener of an operation that nobody watches."""


def with_stage(listener: ProgressListener, stage: str) -> ProgressListener:
    """Return a listener that passes progress on under the caller's name of the stage."""
    return lambda progress: listener(replace(progress, stage=stage))
