"""The progress protocol: a dataclass, a callable to which every long operation reports, and the time left."""

import time
from collections.abc import Callable, Mapping
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
    seconds_left: float | None = None
    """Expected seconds until the whole command ends; None if unknown."""


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


_SURE_SHARE = 0.2
"""From this share of a stage on, its own speed predicts its end better than the expectation does."""


class Timetable:
    """Adds the expected seconds left of the whole command to progress, and corrects the expectation as stages end.

    A listener. Stages are known by the first words of their text, in the order in which they come. Progress of a stage
    that is not in the table counts as the stage before it. If the finished stages took twice the expected time, so will
    the others.

        expected   load 3 s   logits 6 s   merge 4 s          finished: load, in 6 s (twice the expectation)
        left                  12 s       + 8 s
    """

    def __init__(
        self,
        listener: ProgressListener,
        expected: Mapping[str, float],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listener, self._clock = listener, clock
        self._stages = list(expected)
        self._expected = list(expected.values())
        self._at, self._began = 0, clock()
        self._share = 0.0
        self._finished, self._finished_expected = 0.0, 0.0

    def __call__(self, progress: Progress) -> None:
        """Forward progress with the time left."""
        found = self._find(progress.stage)
        if found is not None and found != self._at:
            now = self._clock()
            self._finished += now - self._began
            self._finished_expected += sum(self._expected[self._at : max(found, self._at + 1)])
            self._at, self._began, self._share = found, now, 0.0
        self._share = progress.done / progress.total if progress.total and found == self._at else 0.0
        self._listener(replace(progress, seconds_left=self.seconds_left()))

    def seconds_left(self) -> float:
        """Return the expected seconds until the last stage ends."""
        elapsed = self._clock() - self._began
        # Weighted with a second on each side, so that a first stage of milliseconds says little about the others.
        speed = (self._finished + 1) / (self._finished_expected + 1)
        current = max(0.0, self._expected[self._at] * speed - elapsed)
        if self._share >= _SURE_SHARE:
            current = elapsed * (1 - self._share) / self._share
        return current + speed * sum(self._expected[self._at + 1 :])

    def _find(self, stage: str) -> int | None:
        """Return the index of a stage. Stages never go back, because texts may repeat."""
        known = [index for index, name in enumerate(self._stages) if stage.startswith(name) and index >= self._at]
        return known[0] if known else None
