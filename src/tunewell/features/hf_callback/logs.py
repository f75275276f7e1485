"""Write `events.jsonl` and `healing.jsonl` for a training with HealthCallback, in the format of a run."""

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from tunewell.core.errors import UserError
from tunewell.records.events import EventLog
from tunewell.records.healing import HEALING, HealingEntry
from tunewell.training.health import StepMetrics

_NOT_LOGGED = ("norm_limit", "held_out_loss")


class HealthLog:
    """The log files of one training, written by rank 0 (`is_on`); raises UserError if the folder is not writable."""

    def __init__(self, folder: Path, *, finished_steps: int, is_on: bool, say: Callable[[str], None]) -> None:
        self.healing_path = folder / HEALING
        self._say = say
        self._events: EventLog | None = None
        self._healing: EventLog | None = None
        self._best = math.inf
        if not is_on:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._events = EventLog(folder / "events.jsonl", on_trouble=say)
            self._events.truncate_to(finished_steps)  # a resumed training repeats the later steps
            if finished_steps == 0:
                self.healing_path.unlink(missing_ok=True)
        except OSError as error:
            fix = "pass a writable `folder` to HealthCallback"
            raise UserError(f"cannot write to `{folder}` ({error.strerror})", fix=fix) from error

    def step(self, metrics: StepMetrics) -> None:
        """Write a step; unknown values are left out."""
        known = {key: value for key, value in asdict(metrics).items() if value is not None and key not in _NOT_LOGGED}
        if self._events is not None:
            self._events.append({"kind": "step", **known})

    def evaluation(self, step: int, loss: float, *, seconds: float | None) -> None:
        """Write an evaluation."""
        is_best = -math.inf < loss < self._best
        self._best = loss if is_best else self._best
        if self._events is not None:
            known = {} if seconds is None else {"seconds": seconds}
            self._events.append({"kind": "held_out", "step": step, "loss": loss, **known, "is_best": is_best})

    def heal(self, entry: HealingEntry) -> None:
        """Write a finding and its action; the file is created with the first entry."""
        if self._events is None:
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
