"""The state of a run for its screen: last steps, evaluations, trend of the loss, speed, time left."""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from tunewell.cli.progress import StageText
from tunewell.core.progress import Progress
from tunewell.records.healing import HealingEntry
from tunewell.training.events import Evaluated, Event, Healed, Note, Rewound, RunStarted, Sample, StepTaken

RECENT_STEPS = 40
_FEWEST_FOR_TREND = 5
_RECENT_EVALUATIONS = 5


@dataclass
class RunState:
    """A listener that stores the recent events of a run. All events are in `events.jsonl`."""

    clock: Callable[[], float] = time.monotonic
    start: RunStarted | None = None
    stage: str = ""
    """The current activity between steps; empty during steps."""
    last: StepTaken | None = None
    recent: deque[StepTaken] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    held_out: Evaluated | None = None
    best: Evaluated | None = None
    sample: Sample | None = None
    notes: list[str] = field(default_factory=list)
    healing: list[HealingEntry] = field(default_factory=list)
    num_skipped: int = 0

    def __post_init__(self) -> None:
        self.started = self.last_event = self.stage_started = self.clock()
        self._evaluation_seconds: deque[float] = deque(maxlen=_RECENT_EVALUATIONS)
        self.stage_text = StageText(self.clock)

    def __call__(self, event: Event) -> None:
        """Record an event of the run."""
        now, stage = self.clock(), ""
        match event:
            case Progress():
                self.stage_text(event)
                stage = event.stage
                if stage and stage == self.stage:
                    return
            case RunStarted():
                self.start = event
            case StepTaken():
                self.last = event
                self.recent.append(event)
                self.num_skipped += event.was_skipped
            case Evaluated():
                # The time since the last event counts as evaluation time, because it includes the sample answers.
                self._evaluation_seconds.append(max(event.seconds, now - self.last_event))
                self.held_out = event
                self.best = event if event.is_best else self.best
                self.sample = event.samples[0] if event.samples else self.sample
            case Healed(entry):
                self.healing.append(entry)
            case Note(message):
                self.notes.append(message)
            case Rewound(step):  # the steps after it are repeated
                kept = [taken for taken in self.recent if taken.step <= step]
                self.recent = deque(kept, maxlen=RECENT_STEPS)
                self.last = kept[-1] if kept else None
                return
        self.last_event = now
        if not isinstance(event, Healed | Note):
            self.stage, self.stage_started = stage, now

    @property
    def num_steps(self) -> int:
        """Number of steps of the whole run; 0 if not known yet."""
        return self.start.plan.num_steps.value if self.start else 0

    @property
    def step(self) -> int:
        """Number of finished steps, including those before a resume."""
        return self.last.step if self.last else self.start.first_step if self.start else 0

    def elapsed(self) -> float:
        """Return the seconds since the first event."""
        return self.clock() - self.started

    def tokens_per_second(self) -> float | None:
        """Return the median speed of the recent steps, without evaluations and checkpoints."""
        rates = [event.tokens / event.seconds for event in self.recent if event.seconds > 0]
        return median(rates) if rates else None

    def seconds_left(self) -> float | None:
        """Return an estimate of the time left from the median step and evaluation, or None before the first step."""
        seconds = [event.seconds for event in self.recent if event.seconds > 0]
        if not seconds or self.last is None:
            return None
        steps = max(self.num_steps - self.last.step, 0) * median(seconds)
        evaluations = self._evaluations_left() * median(self._evaluation_seconds) if self._evaluation_seconds else 0.0
        return max(steps + evaluations - (self.clock() - self.last_event), 0.0)

    def _evaluations_left(self) -> int:
        if self.start is None or self.num_steps == 0:
            return 0
        every = max(self.start.plan.evaluate_every.value, 1)
        seen = self.held_out.step if self.held_out else self.start.first_step
        has_final = self.num_steps % every != 0 and seen < self.num_steps
        return max(self.num_steps // every - seen // every, 0) + has_final

    def change(self) -> tuple[float, int] | None:
        """Return the change of the loss over the recent steps (Theil-Sen) and their number, or None with too few."""
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
