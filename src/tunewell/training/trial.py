"""Take steps of a built run whose result is thrown away: `plan`, `profile` and `rehearse` differ in what they measure.

`workflows/trial.py` builds the run in a folder that is removed afterwards.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tunewell.core.progress import silent
from tunewell.records.plan import Chosen, Plan
from tunewell.training.checkpoints import Checkpoints
from tunewell.training.engine import train
from tunewell.training.events import Event, Healed, Listener, StepTaken
from tunewell.training.run import Ending, Run
from tunewell.training.saved_checkpoints import State


class NoCheckpoints(Checkpoints):
    """Checkpoints that are never written."""

    def save(self, state: State, *, is_best: bool = False, wait: bool = False) -> None:
        """Do nothing."""


class NoDocuments:
    """An empty split, so that nothing is evaluated."""

    index: Any = None

    def __len__(self) -> int:
        return 0

    def arrays(self, index: int) -> Any:
        raise IndexError(index)


@dataclass
class TrialSteps:
    """A listener that keeps the steps and forwards all events to the listener of the run."""

    forward: Listener
    taken: list[StepTaken] = field(default_factory=list[StepTaken])
    is_healed: bool = False

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepTaken):
            self.taken.append(event)
        self.is_healed = self.is_healed or isinstance(event, Healed)
        self.forward(event)


def keep_nothing(run: Run) -> None:
    """Evaluate no documents and write no checkpoints from now on."""
    run.held_out = NoDocuments()
    run.checkpoints = NoCheckpoints(run.checkpoints.folder, keep=1, on_trouble=silent)


def with_values(plan: Plan, because: str, values: Mapping[str, Any]) -> Plan:
    """Return the plan with other values, by name."""
    return plan.model_copy(update={name: Chosen(value, because=because) for name, value in values.items()})


def take_trial_steps(
    run: Run, num_steps: int, *, because: str, handle_signals: bool = False, **values: Any
) -> tuple[Ending, TrialSteps]:
    """Train up to a step with a constant learning rate and these values of the plan, which stay in it."""
    run.plan = with_values(run.plan, because, {"num_steps": num_steps, "schedule": "constant", **values})
    steps = TrialSteps(run.listener)
    run.listener = steps
    try:
        return train(run, handle_signals=handle_signals), steps
    finally:
        run.listener = steps.forward
