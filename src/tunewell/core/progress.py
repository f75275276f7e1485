"""The progress protocol: a dataclass, and a callable to which every long operation reports."""

from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Progress:
    """The progress of one stage of a long operation."""

    stage: str
    """The current stage as text for the screen: `loading the model`. Empty when the stage is over."""
    done: int = 0
    total: int = 0
    """0 if the total is unknown."""
    unit: str = ""
    """The unit of `done` and `total`: `bytes`, `documents`."""
    rows: int = 0
    """Number of rows read so far, if `done` counts bytes."""


DOWNLOADING = "downloading"
"""The stage of a download, which `train` shows within others."""

ProgressListener = Callable[[Progress], None]
"""A function that receives progress. It must return quickly and never raise."""


def silent(_: object) -> None:
    """Ignore an event. The default listener."""


def with_stage(listener: ProgressListener, stage: str) -> ProgressListener:
    """Return a listener that replaces the stage by `stage` and forwards the progress."""
    return lambda progress: listener(replace(progress, stage=stage))


def only_stage(listener: ProgressListener, stage: str, otherwise: str) -> ProgressListener:
    """Return a listener that forwards the progress of one stage. Other stages after it are reported as `otherwise`."""
    is_shown = False

    def show(progress: Progress) -> None:
        nonlocal is_shown
        was_shown, is_shown = is_shown, progress.stage == stage
        if is_shown:
            listener(progress)
        elif was_shown:
            listener(Progress(otherwise))

    return show
