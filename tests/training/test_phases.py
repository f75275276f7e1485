"""The clock of the phases: each second belongs to one phase, and events have all of them."""

from pathlib import Path

import pytest
from tiny_runs import Remembering, make_run

from tunewell.records.events import read_events
from tunewell.training import step
from tunewell.training.engine import train
from tunewell.training.step import PhaseClock


class _Time:
    """A clock that a test sets."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Time:
    time = _Time()
    monkeypatch.setattr(step, "time", time)
    return time


def test_a_nested_phase_interrupts_the_outer_one(clock: _Time) -> None:
    """Counted twice, the answers of an evaluation would make the phases longer than the run."""
    timed = PhaseClock()
    clock.now += 1
    with timed("evaluate"):
        clock.now += 2
        with timed("answers"):
            clock.now += 4
        clock.now += 8
    clock.now += 16
    assert timed.take() == {"other": 17, "evaluate": 10, "answers": 4}
    assert timed.take() == {}


def test_a_phase_that_raises_is_left(clock: _Time) -> None:
    """An out-of-memory error inside a phase must not count the rest of the run to it."""
    timed = PhaseClock()
    with pytest.raises(ValueError), timed("forward"):
        clock.now += 1
        raise ValueError
    clock.now += 5
    assert timed.take() == {"forward": 1, "other": 5}


def test_the_time_between_two_runs_of_the_loop_belongs_to_no_phase(clock: _Time) -> None:
    timed = PhaseClock()
    clock.now += 60
    timed.start()
    clock.now += 1
    assert timed.take() == {"other": 1}


def test_every_step_records_its_phases_and_its_work(tmp_path: Path) -> None:
    """Without these fields, nothing in a finished run shows what it waited for."""
    run = make_run(tmp_path / "run", plan={"num_steps": 6, "evaluate_every": 3, "save_every": 3})
    train(run)
    events = [event for event in read_events(tmp_path / "run" / "events.jsonl") if event["kind"] == "step"]
    for event in events:
        assert {"data", "forward", "backward", "optimizer", "log"} <= event["phases"].keys()
        assert event["micro_batches"] >= 1
        assert event["computed_tokens"] == event["tokens"]
    # The evaluation and the checkpoint after step 3 are in the event of step 4.
    assert {"evaluate", "save"} <= events[3]["phases"].keys()
    assert not {"evaluate", "save"} & events[2]["phases"].keys()
    assert isinstance(run.listener, Remembering)
    assert run.listener.steps[-1].phases == events[-1]["phases"]


def test_time_that_other_programs_took_is_a_phase_of_its_own(clock: _Time) -> None:
    """On a busy machine, a profile would blame the forward pass for the work of other programs."""
    timed, waited = PhaseClock(), 3.0
    timed.waited = lambda: waited
    timed.start()
    with timed("forward"):
        clock.now += 10
        waited += 4
    assert timed.take() == {"forward": 6, "processor": 4}
