"""What the screen knows of a run, and the few things it works out: trend, speed, time left. Numbers in, numbers out."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tunewell.records.healing import HealingEntry
    from tunewell.training.events import HeldOutEvent, Sample, Start, StepEvent

RECENT_STEPS = 40
_FEWEST_FOR_TREND = 5
_RECENT_LOOKS = 5


@dataclass
class RunSoFar:
    """A run as its watcher saw it; the last steps are kept, the older ones are in `events.jsonl`."""

    clock: Callable[[], float] = time.monotonic
    start: "Start | None" = None
    stage: str = ""
    """What is going on instead of steps; empty while steps are taken."""
    last: "StepEvent | None" = None
    recent: "deque[StepEvent]" = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    held_out: "HeldOutEvent | None" = None
    best: "HeldOutEvent | None" = None
    sample: "Sample | None" = None
    notes: list[str] = field(default_factory=list)
    healing: "list[HealingEntry]" = field(default_factory=list)
    num_skipped: int = 0

    def __post_init__(self) -> None:
        self.began = self.heard = self.stage_began = self.clock()
        self._looks: deque[float] = deque(maxlen=_RECENT_LOOKS)

    def doing(self, stage: str) -> None:
        """Remember what is going on."""
        self.stage = stage
        self.heard = self.stage_began = self.clock()

    def begun(self, start: "Start") -> None:
        """Remember what the run is."""
        self.start = start
        self.notes += start.notes
        self.doing("")

    def stepped(self, event: "StepEvent") -> None:
        """Remember a step."""
        self.last = event
        self.recent.append(event)
        self.num_skipped += event.was_skipped
        self.doing("")

    def looked(self, event: "HeldOutEvent", samples: "Sequence[Sample]") -> None:
        """Remember a look, and how long it took with its samples and whatever else lay between it and the last news."""
        self._looks.append(max(event.seconds, self.clock() - self.heard))
        self.held_out = event
        if event.is_best:
            self.best = event
        if samples:
            self.sample = samples[0]
        self.doing("")

    def healed(self, entry: "HealingEntry") -> None:
        """Remember what went wrong and what was done about it."""
        self.healing.append(entry)
        self.heard = self.clock()

    def rewound(self, step: int) -> None:
        """Forget the steps that are taken again."""
        kept = [event for event in self.recent if event.step <= step]
        self.recent.clear()
        self.recent.extend(kept)
        self.last = kept[-1] if kept else None

    def noted(self, message: str) -> None:
        """Remember a note."""
        self.notes.append(message)
        self.heard = self.clock()

    @property
    def num_steps(self) -> int:
        """Steps of the whole run; 0 while that is not known."""
        return self.start.plan.num_steps.value if self.start else 0

    @property
    def step(self) -> int:
        """Steps done, those before a resume included."""
        return self.last.step if self.last else self.start.first_step if self.start else 0

    def elapsed(self) -> float:
        """Seconds since the watching began."""
        return self.clock() - self.began

    def tokens_per_second(self) -> float | None:
        """Median over the recent steps; looks and checkpoints do not count."""
        rates = [event.tokens / event.seconds for event in self.recent if event.seconds > 0]
        return median(rates) if rates else None

    def seconds_left(self) -> float | None:
        """Median step times steps left, and median look times looks left; None before the first step."""
        seconds = [event.seconds for event in self.recent if event.seconds > 0]
        if not seconds or self.last is None:
            return None
        steps = max(self.num_steps - self.last.step, 0) * median(seconds)
        looks = self._looks_left() * median(self._looks) if self._looks else 0.0
        return max(steps + looks - (self.clock() - self.heard), 0.0)

    def _looks_left(self) -> int:
        if self.start is None or self.num_steps == 0:
            return 0
        every = max(self.start.plan.evaluate_every.value, 1)
        seen = self.held_out.step if self.held_out else self.start.first_step
        at_the_end = self.num_steps % every != 0 and seen < self.num_steps
        return max(self.num_steps // every - seen // every, 0) + at_the_end

    def change(self) -> tuple[float, int] | None:
        """Say by how much the loss changed over the recent steps, and over how many; None while there are too few.

        The median slope between any two of them (Theil-Sen): one wild step does not turn it around.
        """
        points = [(event.step, event.loss) for event in self.recent if math.isfinite(event.loss)]
        slopes = [
            (later - sooner) / (step - earlier)
            for number, (earlier, sooner) in enumerate(points)
            for step, later in points[number + 1 :]
            if step != earlier
        ]
        if len(points) < _FEWEST_FOR_TREND or not slopes:
            return None
        num_steps = abs(points[-1][0] - points[0][0])
        return median(slopes) * num_steps, num_steps
