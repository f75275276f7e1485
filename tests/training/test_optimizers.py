"""The learning rate, against transformers' schedules, and a new optimizer in one class."""

import pytest
import torch
from tiny_runs import make_run
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
    get_polynomial_decay_schedule_with_warmup,
)
from transformers.optimization import get_cosine_with_min_lr_schedule_with_warmup

from tunewell.config.extensions import OPTIMIZERS, OptimizerEntry
from tunewell.config.schema import Train
from tunewell.training.engine import train
from tunewell.training.optimizers.base import Optimizer, Update, guard_gradients, rate_at
from tunewell.training.run import resume

PEAK = 3e-4
LENGTHS = [(100, 7), (100, 0), (12, 1), (5, 3), (1, 0), (4, 4), (3, 10)]


def _theirs(make, num_steps, **arguments):
    """List the rates of their schedule at the first steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    schedule = make(optimizer, **arguments)
    rates = []
    for step in range(num_steps):
        if step:
            optimizer.step()
            schedule.step()
        rates.append(schedule.get_last_lr()[0])
    return rates


def _reference(schedule, min_share, num_steps, warmup_steps):
    if schedule == "constant":
        return _theirs(get_constant_schedule_with_warmup, num_steps, num_warmup_steps=warmup_steps)
    both = {"num_warmup_steps": warmup_steps, "num_training_steps": num_steps}
    if schedule == "cosine" and min_share:
        return _theirs(get_cosine_with_min_lr_schedule_with_warmup, num_steps, min_lr_rate=min_share, **both)
    if schedule == "linear" and min_share:
        floor = min_share * PEAK
        return _theirs(get_polynomial_decay_schedule_with_warmup, num_steps, lr_end=floor, power=1.0, **both)
    return _theirs(
        get_cosine_schedule_with_warmup if schedule == "cosine" else get_linear_schedule_with_warmup, num_steps, **both
    )


@pytest.mark.parametrize(("num_steps", "warmup_steps"), LENGTHS)
@pytest.mark.parametrize("min_share", [0.0, 0.1])
@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_rates_are_those_of_transformers_with_the_warm_up_one_step_ahead(schedule, min_share, num_steps, warmup_steps):
    """Guards the shape of the curve: what is learned at the same rates can be compared with other trainers."""
    theirs = _reference(schedule, min_share, num_steps, warmup_steps)
    rising = _theirs(get_constant_schedule_with_warmup, num_steps + 1, num_warmup_steps=warmup_steps)
    for step in range(num_steps):
        ours = rate_at(
            step,
            num_steps=num_steps,
            warmup_steps=warmup_steps,
            peak=PEAK,
            schedule=schedule,
            min_share=min_share,
        )
        # Ours reaches the peak with the last step of the warm-up, theirs with the step after it.
        expected = rising[step + 1] if step < warmup_steps else theirs[step]
        assert ours == pytest.approx(expected, rel=1e-12, abs=1e-18)


@pytest.mark.parametrize(("num_steps", "warmup_steps"), LENGTHS)
@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_no_update_is_made_at_rate_zero(schedule, num_steps, warmup_steps):
    """Guards the first and the last step, which elsewhere are computed for nothing."""
    arguments = {"num_steps": num_steps, "warmup_steps": warmup_steps, "peak": PEAK, "schedule": schedule}
    assert all(0 < rate_at(step, **arguments) <= PEAK for step in range(num_steps))


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_after_the_end_the_rate_stays_at_its_floor(schedule):
    """Guards a run that goes on: a cosine left to itself would rise again."""
    arguments = {"num_steps": 10, "warmup_steps": 2, "peak": PEAK, "schedule": schedule, "min_share": 0.2}
    assert [rate_at(step, **arguments) for step in (10, 13, 25)] == pytest.approx([0.2 * PEAK] * 3)


def test_the_drawing_in_the_docstring_is_true():
    """Guards the words that explain the offset."""
    rates = [rate_at(k, num_steps=8, warmup_steps=3, peak=1.0, schedule="linear") for k in range(8)]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1, 1, 4 / 5, 3 / 5, 2 / 5, 1 / 5])


class Lion(Optimizer):
    """A toy optimizer: the sign of the gradient, and one counter as state."""

    def __init__(self, parameters, settings):
        super().__init__(parameters, settings)
        self.count = torch.zeros(())

    def update(self, *, rate, max_norm, loss, scaler, norm_limit=float("inf")):
        grads = self.gradients()
        guard = guard_gradients(grads.values(), loss=loss, scaler=scaler, max_norm=max_norm, norm_limit=norm_limit)
        with torch.no_grad():
            for name, grad in grads.items():
                step = torch.where(guard.was_skipped == 1, 0.0, grad.sign())
                self.parameters[name].sub_(rate * step)
        self.count += 1
        self.zero_grad()
        return Update(guard.norm, guard.was_skipped)

    def state_tensors(self):
        return {"count": self.count}

    def load_state(self, tensors):
        self.count = tensors.get("count", torch.zeros(())).clone()

    def move(self, device):
        self.count = self.count.to(device)


def _nothing(shapes, weight_bytes, settings):
    return 0


def test_a_new_optimizer_is_one_class_and_one_registry_line(tmp_path, monkeypatch):
    """Config, training, checkpoints and resume take it by its name; nothing else knows AdamW."""
    monkeypatch.setattr(OPTIMIZERS, "_entries", dict(OPTIMIZERS._entries))
    OPTIMIZERS.add(
        OptimizerEntry("lion", "the sign of the gradient", f"{__name__}:Lion", state_bytes=_nothing, update_bytes=12.0)
    )
    config = {"train": {"optimizer": "lion"}}
    run = make_run(tmp_path / "run", config=config, plan={"learning_rate": 1e-3})
    assert isinstance(run.learner.optimizer, Lion) and train(run).status == "finished"
    assert all(weight.abs().max() > 0 for name, weight in run.learner.parameters.items() if name.endswith("lora_B"))
    again = make_run(tmp_path / "run", config=config)
    resume(again, again.checkpoints.load(again.checkpoints.newest()))
    assert again.learner.optimizer.count == 12
    with pytest.raises(ValueError, match="optimizer"):
        Train(optimizer="sgd")
