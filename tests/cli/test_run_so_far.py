"""What the screen works out from the numbers of a run."""

import math

import numpy as np
import pytest
from recorded_runs import Clock, a_look, a_start, a_step, play

from tunewell.cli.screens.run_state import RECENT_STEPS, RunState
from tunewell.core.progress import Progress


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def run(clock) -> RunState:
    return RunState(clock)


def test_the_time_left_counts_steps_and_looks(run, clock):
    """Ten looks of half a minute each are what makes "two minutes left" a lie."""
    play(run, clock, num_steps=100, every=10, until=40)
    assert run.seconds_left() == pytest.approx(60 * 2.0 + 6 * 4.0)
    clock.now += 30
    assert run.seconds_left() == pytest.approx(60 * 2.0 + 6 * 4.0 - 30)
    clock.now += 1e6
    assert run.seconds_left() == 0


def test_a_look_takes_as_long_as_the_clock_says(run, clock):
    """The samples made at a look may take longer than the look itself, and belong to it."""
    run(a_start(20, every=10))
    run(a_step(10))
    run(Progress("testing on the held-out rows"))
    clock.now += 25
    run(a_look(10, 1.0))
    assert run.seconds_left() == pytest.approx(10 * 2.0 + 25)


def test_a_look_that_is_due_still_counts(run, clock):
    """After the last step there is still the last look to wait for."""
    play(run, clock, num_steps=100, every=10, until=99)
    run(a_step(100))
    assert run.seconds_left() == pytest.approx(4.0)


def test_the_end_is_looked_at_even_between_two_looks(run, clock):
    """95 steps with a look every ten end with a look of their own."""
    play(run, clock, num_steps=95, every=10, until=90)
    assert run.seconds_left() == pytest.approx(5 * 2.0 + 4.0)


def test_a_slow_first_step_does_not_set_the_time_left(run):
    """The first step compiles, allocates and warms up."""
    run(a_start(100, every=1000))
    for step, seconds in enumerate((60.0, 1.0, 1.0, 1.0), start=1):
        run(a_step(step, seconds=seconds))
    assert run.seconds_left() == pytest.approx(96.0)
    assert run.tokens_per_second() == pytest.approx(4000)


def test_nothing_is_said_before_there_is_something_to_say(run):
    """Zeros would look like measurements."""
    assert (run.step, run.num_steps) == (0, 0)
    run(a_look(0, 2.0))
    run(a_start(100, first_step=50))
    assert run.step == 50
    assert run.seconds_left() is None and run.tokens_per_second() is None and run.change() is None
    run(a_step(51, seconds=0.0))
    assert run.seconds_left() is None and run.tokens_per_second() is None


def test_the_trend_of_a_straight_line_is_its_slope(run):
    """Checked against numpy's least squares, which agree where there is no noise."""
    losses = [2.0 - 0.01 * step for step in range(1, 101)]
    for step, loss in enumerate(losses, start=1):
        run(a_step(step, loss=loss))
    amount, num_steps = run.change() or (0.0, 0)
    slope = float(np.polyfit(range(RECENT_STEPS), losses[-RECENT_STEPS:], 1)[0])
    assert num_steps == RECENT_STEPS - 1
    assert amount == pytest.approx(slope * num_steps)


def test_one_wild_step_does_not_turn_the_trend_around(run):
    """A single hard batch is no trend; least squares would say the loss goes up."""
    for step in range(1, 41):
        run(a_step(step, loss=50.0 if step == 39 else 2.0 - 0.01 * step))
    amount, _ = run.change() or (0.0, 0)
    assert -0.45 < amount < -0.3


def test_what_is_not_finite_is_left_out_of_the_trend_and_counted(run):
    """A nan in an average makes an average of nan."""
    for step in range(1, 21):
        run(a_step(step, loss=math.nan if step % 4 == 0 else 2.0 - 0.01 * step))
    assert run.num_skipped == 5
    amount, num_steps = run.change() or (0.0, 0)
    assert amount == pytest.approx(-0.01 * num_steps)


def test_the_best_look_stays_when_later_ones_are_worse(run):
    """The best checkpoint is the one that will be used."""
    run(a_look(10, 1.0))
    run(a_look(20, 1.2, is_best=False))
    assert run.best is not None and run.held_out is not None
    assert (run.best.step, run.held_out.step) == (10, 20)
