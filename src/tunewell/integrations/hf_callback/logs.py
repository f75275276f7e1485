"""What a watched training writes down: `events.jsonl` and `healing.jsonl`, as in a run of our own."""

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from tunewell.core.errors import UserError
from tunewell.records.events import EventLog
from tunewell.records.healing import HEALING, HealingEntry
from tunewell.training.metrics import StepMetrics

EVENTS = "events.jsonl"
_NOT_OF_STEPS = ("norm_limit", "held_out_loss")


class HealthLogs:
    """The files of one run; only its first process has them (`is_on`).

    Lines of later steps than a resumed run has finished are cut; a run that begins anew begins both files anew. Raises
    UserError where the folder cannot be written to.
    """

    def __init__(self, folder: Path, *, finished_steps: int, is_on: bool, say: Callable[[str], None]) -> None:
        self.healing_path = folder / HEALING
        self._say = say
        self._events: EventLog | None = None
        self._healing: EventLog | None = None
        self._best: float | None = None
        self._is_on = is_on
        if not is_on:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._events = EventLog(folder / EVENTS, on_trouble=say)
            self._events.truncate_to(finished_steps)
            if finished_steps == 0:
                self.healing_path.unlink(missing_ok=True)
        except OSError as error:
            fix = "give HealthCallback a `folder` that can be written to"
            raise UserError(f"`{folder}` cannot be written to ({error.strerror})", fix=fix) from error

    def step(self, reading: StepMetrics) -> None:
        """Write a step; what is not known is left out."""
        known = {key: value for key, value in asdict(reading).items() if value is not None and key not in _NOT_OF_STEPS}
        if self._events is not None:
            self._events.append({"kind": "step", **known})

    def look(self, step: int, loss: float, *, seconds: float | None) -> None:
        """Write a look at held-out rows."""
        is_best = math.isfinite(loss) and (self._best is None or loss < self._best)
        self._best = loss if is_best else self._best
        if self._events is not None:
            known = {} if seconds is None else {"seconds": seconds}
            self._events.append({"kind": "held_out", "step": step, "loss": loss, **known, "is_best": is_best})

    def heal(self, entry: HealingEntry) -> None:
        """Write what was seen and done; the file is there once there is something in it."""
        if not self._is_on:
            return
        if self._healing is None:
            self._healing = EventLog(self.healing_path, on_trouble=self._say)
        self._healing.append(entry.as_json())
        if entry.action != "none":
            self._healing.sync()

    def close(self) -> None:
        """Flush and close the files."""
        for log in (self._events, self._healing):
            if log is not None:
                log.close()
